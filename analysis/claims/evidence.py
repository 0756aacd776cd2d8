"""The runs that claims are judged by, in contexts that are never pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import pandas as pd

from batchscape.analysis.branches.critical import critical_batches
from batchscape.analysis.branches.ramps import compared_ramps
from batchscape.analysis.branches.schedule import varies_on_the_way
from batchscape.analysis.cells import GEOMETRY, RATE, SEEDS, Cells, plain_texts
from batchscape.analysis.commands import timing_command
from batchscape.analysis.comparing.pairs import blocks_of, join_texts, labels_of
from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.equivalence.paired import MARGIN_SETTINGS, stated_margin
from batchscape.analysis.hardware import is_timed_alone, was_started
from batchscape.analysis.joins import rows_of
from batchscape.analysis.learning_rate.aim import LOSS, Optima, final_losses, find_optima
from batchscape.analysis.learning_rate.choice import at_best_learning_rate
from batchscape.analysis.targets.schema import check
from batchscape.config import Affects, affects_of
from batchscape.errors import AnalysisError
from batchscape.record.noise_scale import objective_depends_on_batch

View = Literal["cost", "training", "reaching", "branching"]
"""Memory and times do not depend on settings that decide the loss alone; a loss does; when a target
is reached does not depend on the budget; branches of a training may differ in more than that."""

_MARGIN = MARGIN_SETTINGS["final_eval_loss"]
_CADENCE = "evaluation.every_samples"
_NAMED = ("hardware", "precision", "model.name", "data.name")
_NEEDED = (
    *("stop_reason", "samples", "train_samples", "not_invariant", "timing_note"),
    _MARGIN,
)
"""Columns that runs may lack."""
_REACHES = ("sweep_dir", "run_id", "target_loss", "outcome", "samples_to_target")


@dataclass(frozen=True)
class Context:
    """Runs that may be compared: one machine, precision, model, data, and so on."""

    label: str
    runs: pd.DataFrame
    """One row a run of any status but `rejected`, with all its columns, `seed_block` (runs of one
    sweep and equal seeds) and `block` (of equal timing repeat, too)."""
    evidence: Evidence
    """The evidence that the context is a part of."""

    @cached_property
    def cells(self) -> Cells:
        """The cells with the runs of this context."""
        return replace(self.evidence.cells, runs=self.runs)

    @cached_property
    def figures(self) -> pd.DataFrame:
        """The completed runs with their figures; times only where they are valid."""
        figures = self.cells.figures
        return self.runs.drop(columns=figures.columns, errors="ignore").join(figures, how="inner")

    @cached_property
    def reaches(self) -> pd.DataFrame:
        """Rows of the runs of this context; empty where there are none."""
        reaches, keys = self.evidence.reaches, ["sweep_dir", "run_id"]
        if reaches is None or reaches.empty:
            return self.runs.head(0)
        added = [*GEOMETRY, "trajectory_id", "learning_rate", "seed_block", "timing_valid"]
        rows = reaches.drop(columns=added, errors="ignore")
        return rows.merge(self.runs[[*keys, *added]], on=keys)

    @cached_property
    def as_if_timed(self) -> Context:
        """The same with all times valid, to choose which command to suggest."""
        return replace(self, runs=self.runs.assign(timing_valid=True))

    @cached_property
    def timing_command(self) -> str | None:
        """The command that gives times to the completed runs that have none, if it helps."""
        return timing_command(self.runs, self.evidence.cells.runs)

    @cached_property
    def ages(self) -> pd.DataFrame:
        """The critical batches by branches, as `critical_batches` returns them."""
        return critical_batches(self.cells, self.evidence.steps)

    @cached_property
    def ramps(self) -> pd.DataFrame:
        """Its runs as `compared_ramps` returns them."""
        return compared_ramps(self.cells)

    @cached_property
    def margin(self) -> tuple[float, str]:
        """Nats within which losses count as equal, and why no margin was fixed, if none was."""
        margins = pd.to_numeric(self.runs[_MARGIN], errors="coerce").to_numpy(dtype=float)
        return stated_margin(margins, "final_eval_loss")

    @cached_property
    def optima(self) -> Optima | None:
        """The best learning rate of each global batch, as the report finds it."""
        finals = final_losses(self.runs).assign(seed=self.runs["seed_block"])
        try:
            return find_optima(self.reaches.assign(seed=self.reaches.get("seed_block")), finals)
        except AnalysisError:
            return None

    def at_best(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Keep the rows at the best learning rate of their global batch, with `tuned`.

        None are kept where each batch was set a rate of its own, which is another factor then; a
        rule that makes rates of one setting chooses none.
        """
        if self._best_runs is None:
            rates = self.runs[RATE if RATE in self.runs else "learning_rate"]
            return rows.assign(tuned=False).head(len(rows) if rates.nunique() < 2 else 0)
        keys = ["sweep_dir", "run_id"]
        return rows.reset_index(names="row").merge(self._best_runs, on=keys).set_index("row")

    @cached_property
    def _best_runs(self) -> pd.DataFrame | None:
        """The runs at the best rate of their group and global batch: keys of a run, and `tuned`."""
        if self.optima is None:
            return None
        table, value, _ = self.optima
        keys = [name for name in ("group", "global_batch_size", "learning_rate") if name in table]
        chosen = at_best_learning_rate(*self.optima)[[*keys, "tuned"]].drop_duplicates()
        # Final losses choose a rate for the runs that stopped before the end, too.
        tried = self.runs if value == LOSS else table
        return tried.merge(chosen, on=keys)[["sweep_dir", "run_id", "tuned"]]

    def curves(self, runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return steps and evaluations by `run` (its index) in order of time, NaN where missing."""
        steps = _rows(self.evidence.steps, runs, ["loss", "gradient_norm"])
        return steps, _rows(self.evidence.evals, runs, ["eval_loss"])


@dataclass(frozen=True)
class Evidence:
    """Tables that claims are judged by."""

    cells: Cells
    steps: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Rows of optimizer steps, as loaded."""
    evals: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Rows of evaluations, as loaded."""
    ranks: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Rows of ranks, as loaded."""
    reaches: pd.DataFrame | None = None
    """One row a run and target, as `steps_to_target` returns it; needs `sweep_dir`, `run_id`,
    `target_loss`, `outcome` and `samples_to_target`; `time_to_target_s` and `steps_low` count
    where they are there."""

    _contexts: dict[View, list[Context]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.reaches is not None and not self.reaches.empty:
            check(self.reaches, "a table of steps to target", _REACHES)

    def contexts(self, view: View) -> list[Context]:
        """Return the contexts, in the order of their labels."""
        if view not in self._contexts:
            runs = self._launched_runs()
            if view != "cost":
                runs = runs[~is_timed_alone(runs)]
            groups = runs.groupby(self._labels(runs, view))
            self._contexts[view] = [Context(str(label), group, self) for label, group in groups]
        return self._contexts[view]

    def _launched_runs(self) -> pd.DataFrame:
        runs = self.cells.runs
        runs = runs[was_started(runs)].reindex(columns=[*dict.fromkeys([*runs, *_NEEDED])])
        runs = runs.dropna(subset=list(GEOMETRY)).sort_values(["sweep_dir", "run_id"])
        rates = runs.get("learning_rate", runs.get(RATE, pd.Series(np.nan, runs.index)))
        return runs.assign(
            **{name: runs[name].astype("int64") for name in GEOMETRY},
            learning_rate=pd.to_numeric(rates).astype(float),
            seed_block=blocks_of(runs, ("sweep_dir", *SEEDS)),
            block=blocks_of(runs, ("sweep_dir", *SEEDS, "timing_repeat")),
        )

    def _labels(self, runs: pd.DataFrame, view: View) -> pd.Series[str]:
        """Name the context of each run by the settings in which its runs are equal."""
        others = [n for n in self.cells.key_settings if n not in _NAMED and not _is_free(n, view)]
        parts = [plain_texts(runs[name]) for name in _NAMED if name in runs]
        parts += [labels_of(self.cells, runs, [name]) for name in others if name in runs]
        labels = join_texts(parts, "; ", runs.index)
        if view == "cost":
            return labels
        # An objective of the cut's own compares batches at one place alone.
        is_own = runs["not_invariant"].map(objective_depends_on_batch).astype(bool)
        devices, micro = (runs[name].astype(str) for name in FACTORS[:2])
        return labels.mask(is_own, labels + "; devices " + devices + ", micro " + micro)


def _rows(table: pd.DataFrame, runs: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    names = ["samples", *columns]
    if table.empty:
        return pd.DataFrame(columns=["run", *names], dtype=float)
    rows = rows_of(runs, table, [name for name in names if name in table])
    return rows.reindex(columns=names).assign(run=runs.index.to_numpy()[rows["run"].to_numpy()])


def _is_free(name: str, view: View) -> bool:
    """Tell whether runs of one context may differ in a setting."""
    if name in {RATE, _CADENCE}:
        return True
    affects = affects_of(name)
    if view == "cost" and affects is not None and not affects & Affects.COST:
        return True
    if view == "branching":
        return varies_on_the_way(name)
    return view == "reaching" and name.startswith("budget.")
