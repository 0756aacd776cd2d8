"""What claims are judged by: runs, sorted into contexts that are never pooled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, RATE, SEEDS, Cells, plain_texts
from batchscape.analysis.comparing.pairs import blocks_of, joined, labels_of, logarithm
from batchscape.analysis.comparison import valid_figures
from batchscape.analysis.equivalence.paired import MARGIN_SETTINGS, stated_margin
from batchscape.analysis.hardware import was_started
from batchscape.analysis.joins import rows_of
from batchscape.analysis.targets.tidy import refuse_missing
from batchscape.config import Affects, affects_of

__all__ = ["Context", "Evidence", "View"]

View = Literal["cost", "training", "reaching"]
"""Memory and times do not depend on settings that decide the loss alone; a loss does; when a target
is reached does not depend on the budget."""

_MARGIN = MARGIN_SETTINGS["final_eval_loss"]
_CADENCE = "evaluation.every_samples"
_NAMED = ("hardware", "precision", "model.name", "data.name")
_KEPT = (
    *("sweep_dir", "run_id", "trajectory_id", "cell", "status", "stop_reason", "samples"),
    *("train_samples", "data.name", "not_invariant", "timing_valid", _MARGIN),
)
_REACHES = ("sweep_dir", "run_id", "target_loss", "outcome", "samples_to_target")


@dataclass(frozen=True)
class Context:
    """Runs that may be compared: one machine, precision, model, data, and so on."""

    label: str
    runs: pd.DataFrame
    """One row a run of any status but `rejected`, with its geometry, `learning_rate`,
    `seed_block` (runs of one sweep and equal seeds) and `block` (of equal timing repeat, too)."""
    figures: pd.DataFrame
    """The same columns for completed runs, with what `comparison.valid_figures` returns: times
    only where they are valid."""
    reaches: pd.DataFrame
    """Rows of the runs of this context; empty where there are none."""
    evidence: Evidence
    """What the context is a part of."""

    @cached_property
    def launched(self) -> pd.DataFrame:
        """The runs of this context with all their columns."""
        return self.evidence.cells.runs.loc[self.runs.index]

    @property
    def data(self) -> list[str]:
        """Names of the data that the runs are on."""
        return list(self.runs["data.name"].unique())

    @cached_property
    def stated(self) -> tuple[float, str]:
        """Nats within which losses count as equal, and why no margin was fixed, if none was."""
        margins = pd.to_numeric(self.runs[_MARGIN], errors="coerce").to_numpy(dtype=float)
        return stated_margin(margins, "final_eval_loss")

    def logs(self, figure: str | pd.Series[float]) -> pd.DataFrame:
        """Return the figures with the logarithm of one of them, or of a column, as `value`."""
        column = self.figures[figure] if isinstance(figure, str) else figure
        return self.figures.assign(value=logarithm(column))

    def curves(self, runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return the steps and the evaluations of some runs of the context, in order of time.

        Returns
        -------
        tuple of DataFrame
            `run`, the index of the run in `runs`, and `samples` with `loss` and `gradient_norm`, or
            with `eval_loss`, as floats; NaN where there are none.
        """
        own = self.evidence
        return _rows(own.steps, runs, ["loss", "gradient_norm"]), _rows(
            own.evals, runs, ["eval_loss"]
        )


@dataclass(frozen=True)
class Evidence:
    """Everything that claims are judged by."""

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

    _memory: dict[View, list[Context]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.reaches is not None and not self.reaches.empty:
            refuse_missing(self.reaches, _REACHES, "a table of steps to target, one row a run,")

    @cached_property
    def as_if_timed(self) -> Evidence:
        """The same as if the machine had been free: for what valid times would settle, no more."""
        reaches = self.reaches
        if reaches is not None and "time_to_target_s" in reaches:
            some = reaches["time_to_target_s"].fillna(reaches["samples_to_target"])
            reaches = reaches.assign(time_to_target_s=some)
        runs = self.cells.runs.assign(timing_valid=True)
        return Evidence(replace(self.cells, runs=runs), self.steps, self.evals, self.ranks, reaches)

    def contexts(self, view: View) -> list[Context]:
        """Return the contexts, in the order of their labels."""
        if view not in self._memory:
            self._memory[view] = list(self._contexts(view))
        return self._memory[view]

    def _contexts(self, view: View) -> Iterator[Context]:
        runs = self._runs()
        labels = self._labels(runs, view)
        kept = dict.fromkeys([*_KEPT, *GEOMETRY, "learning_rate", "seed_block", "block"])
        runs = runs.reindex(columns=[*kept])
        figures = valid_figures(self.cells.runs).drop(columns=["cell", "trajectory_id"])
        for label, own in runs.groupby(labels):
            yield Context(
                label=str(label),
                runs=own,
                figures=own.join(figures, how="inner"),
                reaches=self._reaches(own),
                evidence=self,
            )

    def _runs(self) -> pd.DataFrame:
        runs = self.cells.runs
        runs = runs[was_started(runs)]
        runs = runs.dropna(subset=list(GEOMETRY)).sort_values(["sweep_dir", "run_id"])
        rates = runs.get("learning_rate", runs.get(RATE, pd.Series(np.nan, runs.index)))
        return runs.assign(
            **{name: runs[name].astype("int64") for name in GEOMETRY},
            learning_rate=pd.to_numeric(rates).astype(float),
            seed_block=blocks_of(runs, ("sweep_dir", *SEEDS)),
            block=blocks_of(runs, ("sweep_dir", *SEEDS, "timing_repeat")),
        )

    def _labels(self, runs: pd.DataFrame, view: View) -> pd.Series[str]:
        """Name the context of each run by what its runs may not differ in."""
        others = [n for n in self.cells.shown if n not in _NAMED and not _is_free(n, view)]
        parts = [plain_texts(runs[name]) for name in _NAMED if name in runs]
        parts += [labels_of(self.cells, runs, [name]) for name in others if name in runs]
        labels = joined(parts, "; ", runs.index)
        return labels if view == "cost" else _apart_by_rate(runs, labels)

    def _reaches(self, runs: pd.DataFrame) -> pd.DataFrame:
        if self.reaches is None or self.reaches.empty:
            return pd.DataFrame()
        keys = ["sweep_dir", "run_id"]
        added = [*GEOMETRY, "trajectory_id", "learning_rate", "seed_block", "timing_valid"]
        return self.reaches.drop(columns=added, errors="ignore").merge(
            runs[[*keys, *added]], on=keys
        )


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
    return view == "reaching" and name.startswith("budget.")


def _apart_by_rate(runs: pd.DataFrame, labels: pd.Series[str]) -> pd.Series[str]:
    """Tell apart runs of which each global batch was set a learning rate of its own, and no other.

    The rate is another factor then. What a rule makes of one rate is no choice of a batch.
    """
    rates = runs[RATE if RATE in runs else "learning_rate"]
    by_batch = rates.groupby([labels, runs["global_batch_size"]]).nunique().groupby(level=0).max()
    in_all = rates.groupby(labels).nunique()
    is_confounded = labels.map(by_batch.eq(1) & in_all.gt(1)).astype(bool)
    return labels.mask(is_confounded, labels + "; learning rate " + plain_texts(rates))
