"""Loss curves as tables: averaged over runs, thinned to what a figure can show."""

from __future__ import annotations

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.joins import rows_of

__all__ = ["MAX_POINTS", "mean_curves"]

MAX_POINTS = 200
"""Points of a curve; a longer one is averaged over windows of equal numbers of steps."""

PROGRESS = ("optimizer_step", "samples", "train_time_s")
"""Columns that a loss is drawn against."""


def mean_curves(
    cells: Cells, rows: pd.DataFrame, value: str, *, timed: bool, points: int = MAX_POINTS
) -> pd.DataFrame:
    """Average curves over the completed runs of each cell.

    Parameters
    ----------
    rows : DataFrame
        Steps or evaluations, with `sweep_dir`, `run_id` and the columns of progress.
    value : str
        The column to average.
    timed : bool
        Use only runs whose times are valid.
    points : int
        Of a curve, at most.

    Returns
    -------
    DataFrame
        One row for each cell and optimizer step that all of its runs reached (for long curves,
        each window of steps): `cell`, `optimizer_step`, `samples`, `train_time_s` (means),
        `mean`, `low` and `high` (over runs), in order.
    """
    runs = cells.runs[cells.runs["status"].eq("completed")]
    runs = runs[runs["timing_valid"]] if timed else runs
    joined = _windowed(_joined(runs, rows, value).dropna(subset=[value]), points)
    by_run = joined.groupby(["cell", "run", "window"])[[*PROGRESS, value]].mean()
    curves = by_run.groupby(["cell", "window"]).agg(
        **{name: (name, "mean") for name in PROGRESS},
        mean=(value, "mean"),
        low=(value, "min"),
        high=(value, "max"),
        n=(value, "size"),
    )
    curves = curves.reset_index()
    # Where some runs have ended, the mean would jump to that of the others.
    whole = curves["n"] == curves["cell"].map(runs.groupby("cell").size())
    return curves[whole].drop(columns=["n", "window"]).reset_index(drop=True)


def _joined(runs: pd.DataFrame, rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Attach the rows to the cells of their runs."""
    joined = rows_of(runs, rows, [*PROGRESS, value])
    return joined.assign(cell=runs["cell"].to_numpy()[joined["run"]])


def _windowed(rows: pd.DataFrame, points: int) -> pd.DataFrame:
    """Number windows of optimizer steps, so that no curve has more points."""
    longest = rows.groupby("cell")["optimizer_step"].transform("max")
    length = np.ceil(longest / points).clip(lower=1)
    return rows.assign(window=(rows["optimizer_step"] - 1) // length)
