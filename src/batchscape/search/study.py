"""The trials of one study, kept by Optuna: asked once each, told once each."""

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

from batchscape.plan.expand import Interval
from batchscape.search.objective import TrialOutcome
from batchscape.search.space import UNJUDGED_SHARE, Space

__all__ = ["Study", "storage_of"]

_FIRST_TRIALS = 4
"""Trials before a sampler has something to learn from, and before their median does."""


def storage_of(folder: Path) -> BaseStorage:
    """Open the journal that keeps the trials of a search; nobody else works in its folder."""
    journal = folder / "optuna.journal"
    # Whoever held it was killed: the folder is ours alone.
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if journal.exists() and not (content := journal.read_bytes()).endswith(b"\n"):
        # A line that was torn by a full disk or a crash was never read by anybody.
        os.truncate(journal, content.rfind(b"\n") + 1)
    return JournalStorage(JournalFileBackend(str(journal)))


def _distribution_of(interval: Interval) -> BaseDistribution:
    low, high, is_log = interval.low, interval.high, interval.is_log
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=is_log)
    return FloatDistribution(low, high, log=is_log)


def _sampler_of(name: str, seed: int) -> BaseSampler:
    """Return what draws one trial, by a seed of its own, so that a killed command repeats none."""
    if name == "tpe":
        return TPESampler(seed=seed, n_startup_trials=_FIRST_TRIALS)
    if name == "gp":
        return GPSampler(seed=seed, n_startup_trials=_FIRST_TRIALS)
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
        self._space, self._name, self._storage = space, name, storage
        self._judged: set[int] = set()
        """Trials whose earlier losses this process has judged."""
        self._seed = zlib.crc32(f"{space.first_seed} {name}".encode())
        self._distributions = {one.key: _distribution_of(one) for one in space.intervals}
        self._distributions |= {
            key: CategoricalDistribution(values) for key, values in space.choices.items()
        }
        with _quiet():
            # What draws is asked elsewhere, see `_next`.
            self._study = optuna.create_study(
                storage=storage,
                sampler=RandomSampler(),
                study_name=name,
                directions=["minimize"] * len(space.sampler.objective),
                load_if_exists=True,
            )
            self._study.set_metric_names(list(space.sampler.objective))

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials that were asked, by number."""
        return self._study.get_trials(deepcopy=False)

    @property
    def untold(self) -> list[FrozenTrial]:
        """Trials that were asked and not told, those of a killed command among them."""
        return [trial for trial in self.trials if trial.state is TrialState.RUNNING]

    @property
    def told(self) -> int:
        """Trials that are over."""
        return len(self.trials) - len(self.untold)

    @property
    def wanted(self) -> int:
        """Trials that it is to have; no fewer than there are."""
        if self._space.laid:
            return len(self.trials) + len(self._laid_and_unasked())
        return max(self._space.trials, len(self.trials))

    def ask(self) -> FrozenTrial:
        """Ask for one more trial."""
        with _quiet():
            # One entry of the journal: a kill leaves the whole trial, or none.
            trial = create_trial(
                state=TrialState.RUNNING,
                params=self._next(),
                distributions=self._distributions,
                user_attrs={"outcome": "", "runs": "", "reason": ""},
            )
            self._study.add_trial(trial)
        return self.trials[-1]

    def loss_at_cut(self, number: int, curve: Mapping[int, float], samples: int) -> float | None:
        """Report how a trial does, and say whether `search.pruner` cuts it.

        Parameters
        ----------
        number : int
        curve : mapping of int to float
            Held-out losses so far, by samples.
        samples : int
            Of a full run.

        Returns
        -------
        float or None
            The least loss until then, for which it is cut; None: it goes on.
        """
        self._study.pruner = MedianPruner(
            n_startup_trials=_FIRST_TRIALS,
            n_warmup_steps=math.ceil(UNJUDGED_SHARE * samples),
            n_min_trials=_FIRST_TRIALS,
        )
        trial, reported = self._trial(number), dict(self.trials[number].intermediate_values)
        # A command that was killed may have reported the loss for which the trial is cut.
        if reported and number not in self._judged and trial.should_prune():
            return min(reported.values())
        self._judged.add(number)
        for at in sorted(curve.keys() - reported.keys()):
            trial.report(curve[at], at)
            reported[at] = curve[at]
            if trial.should_prune():
                return min(reported.values())
        return None

    def tell(
        self, number: int, outcome: TrialOutcome, runs: Sequence[str], curve: Mapping[int, float]
    ) -> None:
        """Note how a trial ended, and tell it if that is not to be repeated.

        Parameters
        ----------
        number : int
        outcome : TrialOutcome
        runs : sequence of str
            Their names.
        curve : mapping of int to float
            Its held-out losses by samples, where others are cut by them.
        """
        trial = self._trial(number)
        noted = {"outcome": outcome.state, "runs": " ".join(runs), "reason": outcome.reason or ""}
        for key, text in noted.items():
            trial.set_user_attr(key, text)
        if not outcome.is_over:
            return
        with _quiet():
            for samples, loss in curve.items():
                trial.report(loss, samples)
            if outcome.values is not None:
                has_value = all(map(math.isfinite, outcome.values))
                trial.set_constraint("has a value", 0.0 if has_value else 1.0)
                self._study.tell(trial, outcome.values, TrialState.COMPLETE)
            else:
                is_cut = outcome.state == "pruned"
                self._study.tell(trial, state=TrialState.PRUNED if is_cut else TrialState.FAIL)

    def best(self) -> list[FrozenTrial]:
        """Return the best trial, or those of the front; none where no trial has a value."""
        front = sorted(self._study.best_trials, key=lambda trial: trial.values)
        return front if len(self._space.sampler.objective) > 1 else front[:1]

    def table(self) -> pd.DataFrame:
        """Return what `write_trials` takes of this study."""
        shown = ("number", "state", "params", "values", "user_attrs")
        table = self._study.trials_dataframe(shown, multi_index=True)
        table.columns = table.columns.map(lambda names: names[1] or names[0])
        objectives, best = list(self._space.sampler.objective), self.best()
        # Of what was cut Optuna has the last loss.
        table.loc[table["state"] != "COMPLETE", objectives] = None
        table["study"], table["trial"] = self._name, table["number"]
        table["is_best"] = table["number"].isin([trial.number for trial in best])
        columns = ["study", "trial", *self._space.keys, *objectives]
        return table[[*columns, "outcome", "is_best", "runs", "reason"]]

    def _next(self) -> dict[str, Any]:
        """Choose the point of the next trial: in a copy, so that a kill leaves no half of it."""
        if self._space.laid:
            return self._laid_and_unasked()[0]
        name, trials = self._space.sampler.name, self.trials
        if name != "random" and len(trials) < _FIRST_TRIALS:
            # Optuna draws the first one at random, and then those of Sobol's sequence.
            copy = optuna.create_study(sampler=QMCSampler(scramble=True, seed=self._seed))
            return [copy.ask(self._distributions).params for _ in range(len(trials) + 2)][-1]
        sampler = _sampler_of(name, self._seed + len(trials))
        copy = optuna.create_study(directions=self._study.directions, sampler=sampler)
        copy.add_trials(trials)
        return copy.ask(self._distributions).params

    def _laid_and_unasked(self) -> list[dict[str, Any]]:
        known = [trial.params for trial in self.trials]
        return [point for point in self._space.laid if point not in known]

    def _trial(self, number: int) -> Trial:
        study = self._storage.get_study_id_from_name(self._name)
        trial = self._storage.get_trial_id_from_study_id_trial_number(study, number)
        return Trial(self._study, trial)


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
