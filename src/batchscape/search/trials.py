"""The trials of all studies, side by side: asked, launched, told."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from batchscape.launch.result import SweepResult
from batchscape.record.spec import RunSpec
from batchscape.record.status import Status
from batchscape.record.trials import write_trials
from batchscape.search.launching import Launching
from batchscape.search.objective import NOT_MEASURED, curve_of, outcome_of
from batchscape.search.space import Space
from batchscape.search.study import Study

__all__ = ["run_trials"]


@dataclass
class _Trial:
    """A trial that was asked for, and is not told yet."""

    study: Study
    number: int
    runs: list[RunSpec | str]
    """Of each seed its run, or the rule that it breaks."""

    @property
    def specs(self) -> list[RunSpec]:
        """Its runs; none where a rule is broken."""
        specs = [run for run in self.runs if isinstance(run, RunSpec)]
        return specs if len(specs) == len(self.runs) else []


class _Trials:
    """Asks for trials while runs are at work, and tells them as these end.

    Every study has as many trials at a time as keep the machine at work: a trial learns of those
    before it.

    Parameters
    ----------
    space : Space
    studies : mapping of str to Study
    launching : Launching
    """

    def __init__(self, space: Space, studies: Mapping[str, Study], launching: Launching) -> None:
        self._space, self._studies, self._launching = space, studies, launching
        self._sweep = launching.sweep
        at_once = launching.corner.cells[0].config.launcher.concurrent_runs
        self._at_a_time = math.ceil(at_once / (len(studies) * space.sampler.seeds))
        self._open: dict[tuple[str, int], _Trial] = {}
        self._faults = set[tuple[str, int]]()
        self._returned: set[str] = set()
        self._cuts = space.sampler.pruner != "none"

    @property
    def runs(self) -> int:
        """Runs of all trials that are not told yet, unless some cannot be built."""
        return sum(s.wanted - s.told for s in self._studies.values()) * self._space.sampler.seeds

    def more(self, over: Collection[str]) -> list[RunSpec]:
        """Tell what is over, and return the runs of the trials that are asked for next."""
        while True:
            self.tell(over)
            asked = list(self._ask())
            if asked:
                self._write()
            specs = {spec.run_id: spec for trial in asked for spec in trial.specs}
            new = {name: spec for name, spec in specs.items() if name not in self._returned}
            self._returned |= set(new)
            # A trial whose cells are rejected, or whose point was asked before, is over already.
            if new or not asked:
                return list(new.values())

    def tell(self, over: Collection[str]) -> None:
        """Tell the trials whose runs are over."""
        told = [key for key, trial in self._open.items() if self._tell(*key, trial, over)]
        for key in told:
            del self._open[key]
        if told:
            self._write()

    def cut(self, spec: RunSpec) -> str | None:
        """Return why a run goes on no longer; None: it does."""
        if not self._cuts:
            return None
        trial = next(
            trial
            for trial in self._open.values()
            if any(own.run_id == spec.run_id for own in trial.specs)
        )
        curve = curve_of(self._sweep.run(spec.run_id))
        if not trial.study.is_cut(trial.number, curve, spec.samples):
            return None
        return (
            "cut by search.pruner=median: the least of its held-out losses so far, "
            f"{min(curve.values()):.4g}, is above the median of the trials before it"
        )

    @property
    def progress(self) -> str:
        """How many trials are told."""
        studies = self._studies.values()
        return f"Trials: {sum(s.told for s in studies)} of {sum(s.wanted for s in studies)}"

    def _ask(self) -> Iterator[_Trial]:
        """Yield the trials that come next, those of a killed command first."""
        first, seeds = self._space.first_seed, self._space.sampler.seeds
        for of in self._space.studies:
            study = self._studies[of.name]
            asked = [t for t in study.untold if (of.name, t.number) not in self._faults]
            while len(asked) < self._at_a_time and len(study.trials) < study.wanted:
                asked.append(study.ask())
            for trial in asked:
                key = of.name, trial.number
                if key not in self._open:
                    cells = [of.at(trial.params, seed) for seed in range(first, first + seeds)]
                    self._open[key] = _Trial(study, trial.number, self._launching.plan(cells))
                    yield self._open[key]

    def _tell(self, study: str, number: int, trial: _Trial, over: Collection[str]) -> bool:
        """Tell a trial if it is over; whether there is nothing more to do for it."""
        names = [spec.run_id for spec in trial.specs]
        if not all(name in over for name in names):
            return False
        outcome = outcome_of(trial.runs, self._sweep, self._space.sampler.objective)
        curve = curve_of(self._sweep.run(names[0])) if self._cuts and names else {}
        trial.study.tell(number, outcome, names, curve)
        said = f"Trial {number} of {study} {outcome.state}: {outcome.reason}"
        if not outcome.is_over:
            self._faults.add((study, number))
            said += "; the same command with --retry failed,timeout runs it again"
        if not outcome.is_over or outcome.state in {NOT_MEASURED, Status.REJECTED}:
            # What else has no value, the launch has told.
            self._launching.console.print(said)
        return True

    def _write(self) -> None:
        write_trials(self._sweep, [study.table() for study in self._studies.values()])


def run_trials(space: Space, studies: Mapping[str, Study], launching: Launching) -> SweepResult:
    """Ask, run and tell until every study has its trials, or a signal stops it.

    Parameters
    ----------
    space : Space
    studies : mapping of str to Study
        By name.
    launching : Launching
        Of the trials.
    """
    trials = _Trials(space, studies, launching)
    if any(study.told for study in studies.values()):
        launching.console.print(trials.progress)
    result = SweepResult((), interrupted=False)
    specs = trials.more(frozenset())
    while specs:
        result = launching.launch(specs, trials)
        is_stopped = result.interrupted or result.stopped is not None
        if is_stopped:
            # Runs that ended meanwhile.
            trials.tell({run.run_id for run in result.runs if run.status.is_sealed})
        launching.console.print(trials.progress)
        if is_stopped:
            break
        specs = trials.more({run.run_id for run in result.runs})
    return result
