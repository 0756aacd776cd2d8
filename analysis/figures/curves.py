"""Loss curves as tables: averaged over runs, thinned to what a figure can show."""

from __future__ import annotations

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.joins import rows_of

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
    joined = rows_of(runs, rows, [*PROGRESS, value])
    joined = joined.assign(cell=runs["cell"].to_numpy()[joined["run"]]).dropna(subset=[value])
    longest = joined.groupby("cell")["optimizer_step"].transform("max")
    window_steps = np.ceil(longest / points).clip(lower=1)
    joined["window"] = (joined["optimizer_step"] - 1) // window_steps
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
    has_all_runs = curves["n"] == curves["cell"].map(runs.groupby("cell").size())
    return curves[has_all_runs].drop(columns=["n", "window"]).reset_index(drop=True)
