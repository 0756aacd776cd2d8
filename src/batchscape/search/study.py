"""The trials of one study, kept by Optuna: asked once each, told once each."""

from __future__ import annotations

import itertools
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from optuna.samplers import BaseSampler, GPSampler, QMCSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from batchscape.config import Sampler
from batchscape.errors import ConfigError
from batchscape.plan.expand import Interval
from batchscape.search.objective import Outcome
from batchscape.search.space import Space

__all__ = ["Asked", "Study", "grid_of", "sampler_of", "storage_of"]

_STARTUP = 4
"""Trials before a sampler has something to learn from."""
_MEMORY = "peak_allocated_gib"


@dataclass(frozen=True)
class Asked:
    """A trial that was asked for, and is not told yet."""

    number: int
    """From 0, by study."""
    point: dict[str, Any]
    """Its searched values, by key."""


def storage_of(sampler: Sampler, folder: Path) -> BaseStorage:
    """Open what keeps the trials.

    Parameters
    ----------
    sampler : Sampler
    folder : Path
        Of the search; nobody else works in it.

    Raises
    ------
    ConfigError
        If the database cannot be opened.
    """
    if sampler.storage is None:
        journal = folder / "optuna.journal"
        # Whoever held it was killed: the folder is ours alone.
        journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
        return JournalStorage(JournalFileBackend(str(journal)))
    try:
        return get_storage(sampler.storage)
    except Exception as error:  # noqa: BLE001  (each kind of database has its own)
        msg = f"search.storage={sampler.storage} cannot be opened: {error}"
        raise ConfigError(msg) from None


def distributions_of(space: Space) -> dict[str, BaseDistribution]:
    """Return what is searched as Optuna says it."""

    def of(interval: Interval) -> BaseDistribution:
        low, high, is_log = interval.low, interval.high, interval.is_log
        if isinstance(low, int) and isinstance(high, int):
            return IntDistribution(low, high, log=is_log)
        return FloatDistribution(low, high, log=is_log)

    found = {interval.key: of(interval) for interval in space.intervals}
    return found | {key: CategoricalDistribution(list(v)) for key, v in space.choices.items()}


def sampler_of(
    name: str,
    number: int,
    seed: int,
    constraints: Callable[[FrozenTrial], Sequence[float]] | None = None,
) -> BaseSampler:
    """Return what draws a trial; each is drawn anew, so that a killed command repeats nothing.

    Parameters
    ----------
    name : str
        `random`, `tpe` or `gp`; the last two begin with trials that are spread evenly.
    number : int
        Of the trial in its study.
    seed : int
        Of the study.
    constraints : callable, optional
        Returns what a trial has too much of.
    """
    own = seed + number
    if name != "random" and number < _STARTUP:
        return QMCSampler(
            seed=seed,
            scramble=True,
            warn_asynchronous_seeding=False,
            warn_independent_sampling=False,
        )
    if name == "tpe":
        return TPESampler(seed=own, n_startup_trials=_STARTUP, constraints_func=constraints)
    if name == "gp":
        return GPSampler(seed=own, n_startup_trials=_STARTUP, constraints_func=constraints)
    return RandomSampler(seed=own)


def grid_of(space: Space) -> list[dict[str, Any]]:
    """Return points at equal distances, their ends among them, as many as there are trials."""
    combinations = math.prod(len(values) for values in space.choices.values())
    count = len(space.intervals)
    each = int((space.sampler.trials / combinations) ** (1 / count) + 1e-9) if count else 1
    axes = [_between(interval, max(each, 1)) for interval in space.intervals]
    points = itertools.product(*axes, *space.choices.values())
    return [dict(zip(space.keys, point, strict=True)) for point in points]


def _between(interval: Interval, count: int) -> list[Any]:
    low, high = interval.low, interval.high
    shares = [(n + 0.5) / count for n in range(count)] if count < 3 else []
    shares = shares or [n / (count - 1) for n in range(count)]
    is_whole = isinstance(low, int)
    found = [
        low * (high / low) ** share if interval.is_log else low + share * (high - low)
        for share in shares
    ]
    return list(dict.fromkeys(round(v) if is_whole else min(max(v, low), high) for v in found))


class Study:
    """One study.

    Parameters
    ----------
    space : Space
    name : str
        Of the study, unlike any other of the search.
    storage : BaseStorage
    place : str
        What its name in the storage begins with.
    """

    def __init__(self, space: Space, name: str, storage: BaseStorage, place: str = "") -> None:
        self._space, self._name = space, name
        self._distributions = distributions_of(space)
        self._limit_gib = space.sampler.max_memory_gib
        with _quiet():
            self._study = optuna.create_study(
                storage=storage,
                sampler=RandomSampler(seed=0),
                study_name=f"{place}{name}",
                directions=["minimize"] * len(space.sampler.objective),
                load_if_exists=True,
            )
        self._grid = grid_of(space) if space.sampler.name == "grid" else None

    @property
    def wanted(self) -> int:
        """Trials that it is to have."""
        return self._space.sampler.trials if self._grid is None else len(self._grid)

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials that were asked, by number."""
        found = self._study.get_trials(deepcopy=False)
        return [trial for trial in found if trial.state is not TrialState.WAITING]

    @property
    def is_over(self) -> bool:
        """Whether every trial was told."""
        return len(self.trials) >= self.wanted and not self.untold()

    def untold(self) -> list[Asked]:
        """Return the trials that were asked and not told, those of a killed command among them."""
        return [
            self._completed(trial) for trial in self.trials if trial.state is TrialState.RUNNING
        ]

    def ask(self) -> Asked:
        """Ask for one more trial."""
        number = len(self.trials)
        with _quiet():
            if self._grid is not None and not self._study.get_trials(
                deepcopy=False, states=(TrialState.WAITING,)
            ):
                self._study.enqueue_trial(self._grid[number])
            self._study.sampler = sampler_of(
                self._space.sampler.name,
                number,
                zlib.crc32(f"{self._space.sampler.sampler_seed} {self._name}".encode()),
                None if self._limit_gib is None else self._excess_gib,
            )
            trial = self._study.ask(self._distributions)
        return Asked(trial.number, dict(trial.params))

    def told_runs(self) -> list[str]:
        """Return the runs of the trials that are over."""
        return [run for trial in self.trials for run in trial.user_attrs.get("runs", [])]

    def tell(
        self, asked: Asked, outcome: Outcome, runs: Sequence[str], curve: Mapping[int, float]
    ) -> None:
        """Tell how a trial ended, once.

        Parameters
        ----------
        asked : Asked
        outcome : Outcome
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
        if outcome.memory_gib is not None:
            trial.set_user_attr(_MEMORY, outcome.memory_gib)
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
            if trial.state is TrialState.COMPLETE
            and all(map(math.isfinite, trial.values))
            and all(excess <= 0 for excess in self._excess_gib(trial))
        ]
        if len(self._space.sampler.objective) == 1:
            return sorted(done, key=lambda trial: trial.values)[:1]

        def is_beaten(trial: FrozenTrial) -> bool:
            return any(
                other.values != trial.values
                and all(a <= b for a, b in zip(other.values, trial.values, strict=True))
                for other in done
            )

        return sorted((t for t in done if not is_beaten(t)), key=lambda trial: trial.values)

    def _excess_gib(self, trial: FrozenTrial) -> Sequence[float]:
        if self._limit_gib is None:
            return ()
        # What was never measured did not fit.
        return (trial.user_attrs.get(_MEMORY, math.inf) - self._limit_gib,)

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
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
