"""The trials of all studies, side by side: each is asked, launched and told."""

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


@dataclass
class _OpenTrial:
    """A trial that was asked, and is not told yet."""

    study: str
    number: int
    runs: list[RunSpec | str]
    """Run of each seed; in place of a run the rule that it breaks."""
    has_fault: bool = False
    """Whether its runs are over, and another command is to repeat them."""

    @property
    def specs(self) -> list[RunSpec]:
        """Its runs; none where one breaks a rule."""
        specs = [run for run in self.runs if isinstance(run, RunSpec)]
        return specs if len(specs) == len(self.runs) else []


class _TrialSteering:
    """Asks for trials while runs are at work, and tells their outcomes as the runs end.

    Every study has only as many open trials as keep the machine busy, as a trial learns from
    earlier ones.

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
        self._open: dict[tuple[str, int], _OpenTrial] = {}
        self._returned: set[str] = set()

    @property
    def runs(self) -> int:
        """Number of runs of all trials that are not over, unless some cannot be built."""
        return (
            sum(s.planned - s.finished for s in self._studies.values()) * self._space.sampler.seeds
        )

    def next_runs(self, settled_run_ids: Collection[str]) -> list[RunSpec]:
        """Tell the trials that are over, and return the runs of the next ones."""
        while True:
            self.tell(settled_run_ids)
            trials = list(self._ask())
            self.write()
            specs = {spec.run_id: spec for trial in trials for spec in trial.specs}
            new = {name: spec for name, spec in specs.items() if name not in self._returned}
            self._returned |= set(new)
            # A trial whose cells are rejected, or whose point was asked before, is over already.
            if new or not trials:
                return list(new.values())

    def tell(self, over: Collection[str]) -> None:
        """Tell the trials whose runs are over."""
        for key, trial in list(self._open.items()):
            if not trial.has_fault and all(spec.run_id in over for spec in trial.specs):
                self._tell(trial)
                if not trial.has_fault:
                    del self._open[key]

    def reason_to_cut(self, spec: RunSpec) -> str | None:
        """Return why a run is cut; None where it goes on."""
        if self._space.sampler.pruner == "none":
            return None
        # Only trials with one run are cut.
        trial = next(
            trial
            for trial in self._open.values()
            if spec.run_id in {its_spec.run_id for its_spec in trial.specs}
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
        """Number of trials that are over, in words."""
        studies = self._studies.values()
        return f"Trials: {sum(s.finished for s in studies)} of {sum(s.planned for s in studies)}"

    def _ask(self) -> Iterator[_OpenTrial]:
        """Yield the trials that come next, those of a killed command first."""
        first, seeds = self._space.first_seed, range(self._space.sampler.seeds)
        for cells in self._space.studies:
            study = self._studies[cells.name]
            opened = [trial for trial in self._open.values() if trial.study == cells.name]
            faults = sum(trial.has_fault for trial in opened)
            while (
                len(study.running) - faults < self._at_a_time and len(study.trials) < study.planned
            ):
                study.ask()
            for trial in study.running:
                key = cells.name, trial.number
                if key not in self._open:
                    of_seeds = [cells.at(trial.params, first + seed) for seed in seeds]
                    self._open[key] = _OpenTrial(*key, self._launching.plan(of_seeds))
                    yield self._open[key]

    def _tell(self, trial: _OpenTrial) -> None:
        sweep, names = self._launching.sweep, [spec.run_id for spec in trial.specs]
        outcome = outcome_of(trial.runs, sweep, self._space.sampler.objective)
        is_watched = names and self._space.sampler.pruner != "none"
        curve = curve_of(sweep.run(names[0])) if is_watched else {}
        self._studies[trial.study].tell(trial.number, outcome, names, curve)
        trial.has_fault = not outcome.is_over
        text = f"Trial {trial.number} of {trial.study} {outcome.state}: {outcome.reason}"
        if trial.has_fault:
            text += "; the same command with --retry failed,timeout runs it again"
        if trial.has_fault or outcome.state in {NOT_MEASURED, Status.REJECTED}:
            # The launch has reported other trials without a value.
            self._launching.console.print(text)

    def write(self) -> None:
        """Write `trials.csv`."""
        write_trials(self._launching.sweep, [study.table() for study in self._studies.values()])


def run_trials(space: Space, studies: Mapping[str, Study], launching: Launching) -> SweepResult:
    """Ask, launch and tell trials until every study has all of its own, or a signal stops it.

    Parameters
    ----------
    space : Space
    studies : mapping of str to Study
        By name.
    launching : Launching
        Of the trials.
    """
    trials = _TrialSteering(space, studies, launching)
    if any(study.finished for study in studies.values()):
        launching.console.print(trials.progress)
    result = SweepResult((), interrupted=False)
    specs = trials.next_runs(frozenset())
    while specs:
        result = launching.launch(specs, trials)
        is_stopped = result.interrupted or result.why_stopped is not None
        if is_stopped:
            # Some runs may have ended meanwhile.
            trials.tell({run.run_id for run in result.runs if run.status.is_sealed})
            trials.write()
        launching.console.print(trials.progress)
        if is_stopped:
            break
        specs = trials.next_runs({run.run_id for run in result.runs})
    return result
