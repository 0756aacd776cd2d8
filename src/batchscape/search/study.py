"""The trials of one study, kept by Optuna: each is asked once and told once."""

from __future__ import annotations

import math
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import MedianPruner
from optuna.samplers import BaseSampler, GPSampler, QMCSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from threadpoolctl import threadpool_limits

from batchscape.plan.expand import Interval
from batchscape.search.objective import TrialOutcome
from batchscape.search.space import UNJUDGED_SHARE, Space

_FIRST_TRIALS = 4
"""Number of trials before a sampler models them, and before their median cuts others."""


def storage_of(folder: Path) -> BaseStorage:
    """Open the journal of the trials of a search; no other process works in its folder."""
    journal = folder / "optuna.journal"
    # A lock that is left belongs to a process that was killed: the folder is locked for this one.
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if journal.exists() and not (content := journal.read_bytes()).endswith(b"\n"):
        # No process has read a line that a full disk or a crash has torn.
        os.truncate(journal, content.rfind(b"\n") + 1)
    return JournalStorage(JournalFileBackend(str(journal)))


def _distribution_of(interval: Interval) -> BaseDistribution:
    low, high, is_log = interval.low, interval.high, interval.is_log
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=is_log)
    return FloatDistribution(low, high, log=is_log)


def _sampler_of(name: str, seed: int) -> BaseSampler:
    """Return the sampler of one trial, with its own seed, so that a new process repeats none."""
    if name == "tpe":
        return TPESampler(seed=seed, n_startup_trials=_FIRST_TRIALS)
    if name == "gp":
        return GPSampler(seed=seed, n_startup_trials=_FIRST_TRIALS)
    return RandomSampler(seed=seed)


class Study:
    """One study of a search.

    Parameters
    ----------
    space : Space
    name : str
        Name of the study, unique in the search.
    storage : BaseStorage
    """

    def __init__(self, space: Space, name: str, storage: BaseStorage) -> None:
        self._space, self._name, self._storage = space, name, storage
        self._reported_here: set[int] = set()
        """Trials whose earlier losses this process has compared."""
        self._seed = zlib.crc32(f"{space.first_seed} {name}".encode())
        self._distributions = {
            interval.key: _distribution_of(interval) for interval in space.intervals
        }
        self._distributions |= {
            key: CategoricalDistribution(values) for key, values in space.choices.items()
        }
        with _quiet():
            # `_choose_point` uses another sampler.
            self._study = optuna.create_study(
                storage=storage,
                sampler=RandomSampler(),
                study_name=name,
                direction="minimize",
                load_if_exists=True,
            )
            self._study.set_metric_names([space.sampler.objective])

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials, by number."""
        return self._study.get_trials(deepcopy=False)

    @property
    def running(self) -> list[FrozenTrial]:
        """Trials that are not over, those of a killed command included."""
        return [trial for trial in self.trials if trial.state is TrialState.RUNNING]

    @property
    def finished(self) -> int:
        """Number of trials that are over."""
        return len(self.trials) - len(self.running)

    @property
    def planned(self) -> int:
        """Number of trials that the study will have, at least those that exist."""
        if self._space.listed_points:
            return len(self.trials) + len(self._unasked_points())
        return max(self._space.trials, len(self.trials))

    def ask(self) -> FrozenTrial:
        """Ask for one more trial."""
        with _quiet():
            # A single entry of the journal: a kill leaves a complete trial, or none.
            trial = create_trial(
                state=TrialState.RUNNING,
                params=self._choose_point(),
                distributions=self._distributions,
                user_attrs={"outcome": "", "runs": "", "reason": ""},
            )
            self._study.add_trial(trial)
        return self.trials[-1]

    def loss_at_cut(self, number: int, curve: Mapping[int, float], samples: int) -> float | None:
        """Report the losses of a trial, and return whether `search.pruner` cuts it.

        Parameters
        ----------
        number : int
        curve : mapping of int to float
            Held-out losses so far, by samples.
        samples : int
            Samples of a full run.

        Returns
        -------
        float or None
            The least loss so far, for which it is cut; None where it goes on.
        """
        self._study.pruner = MedianPruner(
            n_startup_trials=_FIRST_TRIALS,
            n_warmup_steps=math.ceil(UNJUDGED_SHARE * samples),
            n_min_trials=_FIRST_TRIALS,
        )
        trial, reported = self._trial(number), dict(self.trials[number].intermediate_values)
        # A process that was killed may have reported the loss for which the trial is cut.
        if reported and number not in self._reported_here and trial.should_prune():
            return min(reported.values())
        self._reported_here.add(number)
        for at in sorted(curve.keys() - reported.keys()):
            trial.report(curve[at], at)
            reported[at] = curve[at]
            if trial.should_prune():
                return min(reported.values())
        return None

    def tell(
        self, number: int, outcome: TrialOutcome, runs: Sequence[str], curve: Mapping[int, float]
    ) -> None:
        """Note how a trial ended, and tell it to Optuna unless it is to be repeated.

        Parameters
        ----------
        number : int
        outcome : TrialOutcome
        runs : sequence of str
            Names of its runs.
        curve : mapping of int to float
            Its held-out losses by samples, where a pruner compares them.
        """
        trial = self._trial(number)
        texts = {"outcome": outcome.state, "runs": " ".join(runs), "reason": outcome.reason or ""}
        for key, text in texts.items():
            trial.set_user_attr(key, text)
        if not outcome.is_over:
            return
        with _quiet():
            for samples, loss in curve.items():
                trial.report(loss, samples)
            if outcome.value is not None:
                has_value = math.isfinite(outcome.value)
                trial.set_constraint("has a value", 0.0 if has_value else 1.0)
                self._study.tell(trial, outcome.value, TrialState.COMPLETE)
            else:
                is_cut = outcome.state == "pruned"
                self._study.tell(trial, state=TrialState.PRUNED if is_cut else TrialState.FAIL)

    def best(self) -> FrozenTrial | None:
        """Return the best trial, of equals the first; None where no trial has a value."""
        return min(self._study.best_trials, key=lambda trial: trial.number, default=None)

    def table(self) -> pd.DataFrame:
        """Return the trials of this study for `write_trials`."""
        attributes = ("number", "state", "params", "values", "user_attrs")
        table = self._study.trials_dataframe(attributes, multi_index=True)
        table.columns = table.columns.map(lambda names: names[1] or names[0])
        objective, best = self._space.sampler.objective, self.best()
        # Optuna keeps the last loss of a trial that was cut.
        table.loc[table["state"] != "COMPLETE", objective] = None
        table["study"], table["trial"] = self._name, table["number"]
        table["is_best"] = best is not None and table["number"].eq(best.number)
        columns = ["study", "trial", *self._space.keys, objective]
        return table[[*columns, "outcome", "is_best", "runs", "reason"]]

    def _choose_point(self) -> dict[str, Any]:
        """Choose the next point in a copy of the study: a kill leaves no incomplete trial."""
        if self._space.listed_points:
            return self._unasked_points()[0]
        name, trials = self._space.sampler.name, self.trials
        if name != "random" and len(trials) < _FIRST_TRIALS:
            # Optuna draws the first point at random, and the next ones from Sobol's sequence.
            copy = optuna.create_study(sampler=QMCSampler(scramble=True, seed=self._seed))
            return [copy.ask(self._distributions).params for _ in range(len(trials) + 2)][-1]
        sampler = _sampler_of(name, self._seed + len(trials))
        copy = optuna.create_study(direction="minimize", sampler=sampler)
        copy.add_trials(trials)
        # More threads would take the cores of runs whose times are measured.
        with threadpool_limits(1):
            return copy.ask(self._distributions).params

    def _unasked_points(self) -> list[dict[str, Any]]:
        points = [trial.params for trial in self.trials]
        return [point for point in self._space.listed_points if point not in points]

    def _trial(self, number: int) -> Trial:
        study = self._storage.get_study_id_from_name(self._name)
        trial = self._storage.get_trial_id_from_study_id_trial_number(study, number)
        return Trial(self._study, trial)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log of Optuna, and its warnings about experimental parts."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)
