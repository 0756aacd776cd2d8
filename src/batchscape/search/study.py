"""The trials of one study, kept by Optuna: asked once each, told once each."""

from __future__ import annotations

import itertools
import math
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from batchscape.errors import ConfigError
from batchscape.plan.expand import Interval
from batchscape.search.objective import TrialOutcome, unbeaten
from batchscape.search.points import FIRST_TRIALS, grid_of, spread_of, trials_of
from batchscape.search.space import Space
from batchscape.search.words import point_text

__all__ = ["Asked", "Study", "storage_of"]

_ASKED_AGAIN = 4
"""Times that a sampler may name a point that a trial has, before one is drawn at random."""
_FINER = 16
"""Times as many trials of a grid that are tried for one that keeps those there."""


@dataclass(frozen=True)
class Asked:
    """A trial that was asked for, and is not told yet."""

    number: int
    """From 0, by study."""
    point: dict[str, Any]
    """Its searched values, by key."""


def storage_of(folder: Path) -> BaseStorage:
    """Open the journal that keeps the trials of a search; nobody else works in its folder."""
    journal = folder / "optuna.journal"
    # Whoever held it was killed: the folder is ours alone.
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if journal.exists() and not (content := journal.read_bytes()).endswith(b"\n"):
        # A line that was torn by a full disk or a crash was never read by anybody.
        os.truncate(journal, content.rfind(b"\n") + 1)
    return JournalStorage(JournalFileBackend(str(journal)))


def _distributions_of(space: Space) -> dict[str, BaseDistribution]:
    """Return what is searched as Optuna says it."""

    def of(interval: Interval) -> BaseDistribution:
        low, high, is_log = interval.low, interval.high, interval.is_log
        if isinstance(low, int) and isinstance(high, int):
            return IntDistribution(low, high, log=is_log)
        return FloatDistribution(low, high, log=is_log)

    found = {interval.key: of(interval) for interval in space.intervals}
    return found | {key: CategoricalDistribution(list(v)) for key, v in space.choices.items()}


def _sampler_of(name: str, seed: int) -> BaseSampler:
    """Return what draws a trial; each is drawn anew, so that a killed command repeats nothing.

    Parameters
    ----------
    name : str
        `random`, `tpe` or `gp`.
    seed : int
        Of the trial.
    """
    if name == "tpe":
        return TPESampler(seed=seed, n_startup_trials=FIRST_TRIALS)
    if name == "gp":
        return GPSampler(seed=seed, n_startup_trials=FIRST_TRIALS)
    return RandomSampler(seed=seed)


class Study:
    """One study.

    Parameters
    ----------
    space : Space
    name : str
        Of the study, unlike any other of the search.
    storage : BaseStorage
    """

    def __init__(self, space: Space, name: str, storage: BaseStorage) -> None:
        self._space, self._name = space, name
        self._distributions = _distributions_of(space)
        with _quiet():
            self._study = optuna.create_study(
                storage=storage,
                sampler=RandomSampler(seed=0),
                study_name=name,
                directions=["minimize"] * len(space.sampler.objective),
                load_if_exists=True,
            )
        self._seed = zlib.crc32(f"{space.first_seed} {name}".encode())
        self._first: list[dict[str, Any]] = []
        """Points that are asked before a sampler is."""
        if space.sampler.name == "grid":
            self._first = grid_of(space, space.sampler.trials)
            self._check_grid()
        elif space.sampler.name != "random":
            self._first = spread_of(space, self._seed)

    @property
    def wanted(self) -> int:
        """Trials that it is to have; no fewer than there are."""
        return max(trials_of(self._space), len(self.trials))

    @property
    def told(self) -> int:
        """Trials that are over."""
        return len(self.trials) - len(self.untold())

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials that were asked, by number."""
        found = self._study.get_trials(deepcopy=False)
        return [trial for trial in found if trial.state is not TrialState.WAITING]

    def untold(self) -> list[Asked]:
        """Return the trials that were asked and not told, those of a killed command among them."""
        return [
            self._completed(trial) for trial in self.trials if trial.state is TrialState.RUNNING
        ]

    def ask(self) -> Asked:
        """Ask for one more trial, at a point that none had."""
        with _quiet():
            # A kill may have come before the point that was chosen became a trial.
            if not self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                self._study.enqueue_trial(self._next())
            trial = self._study.ask(self._distributions)
        return Asked(trial.number, dict(trial.params))

    def told_runs(self) -> list[str]:
        """Return the runs of the trials that are over."""
        return [run for trial in self.trials for run in trial.user_attrs.get("runs", [])]

    def tell(
        self, asked: Asked, outcome: TrialOutcome, runs: Sequence[str], curve: Mapping[int, float]
    ) -> None:
        """Tell how a trial ended, once.

        Parameters
        ----------
        asked : Asked
        outcome : TrialOutcome
        runs : sequence of str
            Their names.
        curve : mapping of int to float
            Of one that was cut: its losses by samples.
        """
        trial = self._trial(asked.number)
        for samples, loss in curve.items():
            trial.report(loss, samples)
        trial.set_user_attr("outcome", outcome.state)
        trial.set_user_attr("runs", list(runs))
        if outcome.reason is not None:
            trial.set_user_attr("reason", outcome.reason)
        state, values = TrialState.COMPLETE, outcome.values
        if outcome.state == "pruned":
            state = TrialState.PRUNED
        elif values is None or (len(values) > 1 and not all(map(math.isfinite, values))):
            # A front has no place for what is infinitely bad.
            state, values = TrialState.FAIL, None
        with _quiet():
            self._study.tell(asked.number, values, state)

    def best(self) -> list[FrozenTrial]:
        """Return the best trial, or those of the front; none where no trial has a value."""
        done = [
            trial
            for trial in self.trials
            if trial.state is TrialState.COMPLETE and all(map(math.isfinite, trial.values))
        ]
        if len(self._space.sampler.objective) == 1:
            return sorted(done, key=lambda trial: trial.values)[:1]

        kept = itertools.compress(done, unbeaten([trial.values for trial in done]))
        return sorted(kept, key=lambda trial: trial.values)

    def _next(self) -> dict[str, Any]:
        """Choose the point of the next trial.

        Samplers may name a point again, which would be no new run. They are then told what is known
        of it and asked again, as Optuna's documentation has it ("How can I ignore duplicated
        samples?" in its FAQ): in a copy of the study, so that the study has each point once.
        """
        trials = self.trials
        known = [trial.params for trial in trials]
        if len(trials) < len(self._first):
            return next(point for point in self._first if point not in known)
        seed = self._seed + len(trials)
        copy = optuna.create_study(
            directions=self._study.directions,
            sampler=_sampler_of(self._space.sampler.name, seed),
        )
        copy.add_trials(trials)
        for times in itertools.count(1):
            drawn = copy.ask(self._distributions)
            if drawn.params not in known:
                break
            copy.tell(drawn, state=TrialState.FAIL)
            copy.add_trial(trials[known.index(drawn.params)])
            if times == _ASKED_AGAIN:
                copy.sampler = RandomSampler(seed=seed)
        return dict(drawn.params)

    def _check_grid(self) -> None:
        """Refuse a grid that would lie beside the trials that are there."""
        known = [trial.params for trial in self.trials]
        others = [point for point in known if point not in self._first]
        if not others:
            return
        trials = self._space.sampler.trials
        finer = (
            f"search.trials={count} keeps them, and "
            for count in range(trials + 1, _FINER * trials)
            if all(point in grid_of(self._space, count) for point in known)
        )
        msg = (
            f"{self._name}: search=grid lays the points of all its trials at once, and of the "
            f"{len(known)} trials there {len(others)} lie beside those of search.trials={trials}, "
            f"such as {point_text(others[0])}; {next(finer, '')}search=gp or tpe goes on from any "
            "trials"
        )
        raise ConfigError(msg)

    def _completed(self, frozen: FrozenTrial) -> Asked:
        """Return a trial; a kill may have come before all its values were drawn."""
        trial = self._trial(frozen.number)
        with _quiet():
            for key, wanted in self._distributions.items():
                trial._suggest(key, wanted)
        return Asked(trial.number, dict(trial.params))

    def _trial(self, number: int) -> Trial:
        trials = self._study.get_trials(deepcopy=False)
        return Trial(self._study, trials[number]._trial_id)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what Optuna logs, and that parts of it are new."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)
