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

    study: str
    number: int
    runs: list[RunSpec | str]
    """Of each seed its run, or the rule that it breaks."""
    has_fault: bool = False
    """Whether its runs are over, and are to be repeated by another command."""

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
        at_once = launching.corner.cells[0].config.launcher.concurrent_runs
        self._at_a_time = math.ceil(at_once / (len(studies) * space.sampler.seeds))
        self._open: dict[tuple[str, int], _Trial] = {}
        self._returned: set[str] = set()

    @property
    def runs(self) -> int:
        """Runs of all trials that are not told yet, unless some cannot be built."""
        return sum(s.wanted - s.told for s in self._studies.values()) * self._space.sampler.seeds

    def more(self, over: Collection[str]) -> list[RunSpec]:
        """Tell what is over, and return the runs of the trials that are asked for next."""
        while True:
            self.tell(over)
            asked = list(self._ask())
            self.write()
            specs = {spec.run_id: spec for trial in asked for spec in trial.specs}
            new = {name: spec for name, spec in specs.items() if name not in self._returned}
            self._returned |= set(new)
            # A trial whose cells are rejected, or whose point was asked before, is over already.
            if new or not asked:
                return list(new.values())

    def tell(self, over: Collection[str]) -> None:
        """Tell the trials whose runs are over."""
        for key, trial in list(self._open.items()):
            if not trial.has_fault and all(spec.run_id in over for spec in trial.specs):
                self._tell(trial)
                if not trial.has_fault:
                    del self._open[key]

    def cut(self, spec: RunSpec) -> str | None:
        """Return why a run goes on no longer; None: it does."""
        if self._space.sampler.pruner == "none":
            return None
        # A trial that is cut has one run.
        trial = next(
            one for one in self._open.values() if spec.run_id in {s.run_id for s in one.specs}
        )
        curve = curve_of(self._launching.sweep.run(spec.run_id))
        loss = self._studies[trial.study].loss_at_cut(trial.number, curve, spec.samples)
        if loss is None:
            return None
        return (
            "cut by search.pruner=median: the least of its held-out losses so far, "
            f"{loss:.4g}, is above the median of the trials before it"
        )

    @property
    def progress(self) -> str:
        """How many trials are told."""
        studies = self._studies.values()
        return f"Trials: {sum(s.told for s in studies)} of {sum(s.wanted for s in studies)}"

    def _ask(self) -> Iterator[_Trial]:
        """Yield the trials that come next, those of a killed command first."""
        first, seeds = self._space.first_seed, range(self._space.sampler.seeds)
        for of in self._space.studies:
            study = self._studies[of.name]
            faults = sum(one.has_fault for one in self._open.values() if one.study == of.name)
            while len(study.untold) - faults < self._at_a_time and len(study.trials) < study.wanted:
                study.ask()
            for trial in study.untold:
                key = of.name, trial.number
                if key not in self._open:
                    cells = [of.at(trial.params, first + seed) for seed in seeds]
                    self._open[key] = _Trial(*key, self._launching.plan(cells))
                    yield self._open[key]

    def _tell(self, trial: _Trial) -> None:
        sweep, names = self._launching.sweep, [spec.run_id for spec in trial.specs]
        outcome = outcome_of(trial.runs, sweep, self._space.sampler.objective)
        is_watched = names and self._space.sampler.pruner != "none"
        curve = curve_of(sweep.run(names[0])) if is_watched else {}
        self._studies[trial.study].tell(trial.number, outcome, names, curve)
        trial.has_fault = not outcome.is_over
        said = f"Trial {trial.number} of {trial.study} {outcome.state}: {outcome.reason}"
        if trial.has_fault:
            said += "; the same command with --retry failed,timeout runs it again"
        if trial.has_fault or outcome.state in {NOT_MEASURED, Status.REJECTED}:
            # What else has no value, the launch has told.
            self._launching.console.print(said)

    def write(self) -> None:
        """Write `trials.csv`."""
        write_trials(self._launching.sweep, [study.table() for study in self._studies.values()])


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
            trials.write()
        launching.console.print(trials.progress)
        if is_stopped:
            break
        specs = trials.more({run.run_id for run in result.runs})
    return result
