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

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState
from scipy.stats.qmc import Sobol

from batchscape.config import Sampler
from batchscape.errors import ConfigError
from batchscape.plan.expand import Interval
from batchscape.search.objective import Outcome
from batchscape.search.space import Space

__all__ = ["Asked", "Study", "distributions_of", "grid_of", "sampler_of", "spread_of", "storage_of"]

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
        if journal.exists() and not (content := journal.read_bytes()).endswith(b"\n"):
            # A line that was torn by a full disk or a crash was never read by anybody.
            os.truncate(journal, content.rfind(b"\n") + 1)
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


def sampler_of(name: str, seed: int) -> BaseSampler:
    """Return what draws a trial; each is drawn anew, so that a killed command repeats nothing.

    Parameters
    ----------
    name : str
        `random`, `tpe` or `gp`.
    seed : int
        Of the trial.
    """
    if name == "tpe":
        return TPESampler(seed=seed, n_startup_trials=_STARTUP)
    if name == "gp":
        return GPSampler(seed=seed, n_startup_trials=_STARTUP)
    return RandomSampler(seed=seed)


def spread_of(space: Space, seed: int) -> list[dict[str, Any]]:
    """Return the first points, for samplers that learn: spread evenly, at random.

    Source: Sobol's sequence, scrambled (`scipy.stats.qmc`).
    """
    drawn = Sobol(len(space.keys), rng=np.random.default_rng(seed)).random(_STARTUP)
    return [
        {
            **{i.key: _at(i, share) for i, share in zip(space.intervals, shares, strict=False)},
            **{
                key: values[int(share * len(values))]
                for (key, values), share in zip(
                    space.choices.items(), shares[len(space.intervals) :], strict=True
                )
            },
        }
        for shares in drawn.tolist()
    ]


def grid_of(space: Space) -> list[dict[str, Any]]:
    """Return points at equal distances, their ends among them, as many as there are trials."""
    combinations = math.prod(len(values) for values in space.choices.values())
    count = len(space.intervals)
    each = int((space.sampler.trials / combinations) ** (1 / count) + 1e-9) if count else 1
    axes = [_between(interval, max(each, 1)) for interval in space.intervals]
    points = itertools.product(*axes, *space.choices.values())
    return [dict(zip(space.keys, point, strict=True)) for point in points]


def _between(interval: Interval, count: int) -> list[float]:
    shares = [(n + 0.5) / count for n in range(count)]
    if count > 2:
        shares = [n / (count - 1) for n in range(count)]
    return list(dict.fromkeys(_at(interval, share) for share in shares))


def _at(interval: Interval, share: float) -> float:
    """Return the number that lies so far into an interval."""
    low, high = interval.low, interval.high
    value = low * (high / low) ** share if interval.is_log else low + share * (high - low)
    return round(value) if isinstance(low, int) else min(max(value, low), high)


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
        self._seed = zlib.crc32(f"{space.sampler.sampler_seed} {name}".encode())
        self._is_grid = space.sampler.name == "grid"
        self._first: list[dict[str, Any]] = []
        """Points that are asked before a sampler is."""
        if self._is_grid:
            self._first = grid_of(space)
        elif space.sampler.name != "random":
            self._first = spread_of(space, self._seed)

    @property
    def wanted(self) -> int:
        """Trials that it is to have."""
        return len(self._first) if self._is_grid else self._space.sampler.trials

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
        """Ask for one more trial."""
        number = len(self.trials)
        with _quiet():
            waiting = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            if number < len(self._first) and not waiting:
                self._study.enqueue_trial(self._first[number])
            self._study.sampler = sampler_of(self._space.sampler.name, self._seed + number)
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
        if self._limit_gib is not None:
            # What was never measured did not fit.
            taken_gib = math.inf if outcome.memory_gib is None else outcome.memory_gib
            with _quiet():
                trial.set_constraint(_MEMORY, taken_gib - self._limit_gib)
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
            and (
                self._limit_gib is None
                or trial.user_attrs.get(_MEMORY, math.inf) <= self._limit_gib
            )
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
