"""What the plan predicted of each cell, against what its runs measured."""

from __future__ import annotations

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells
from batchscape.analysis.comparison import valid_figures

PREDICTED = {"peak_allocated_gib": "peak memory", "step_time_s": "step time"}
"""Figures of a run that a plan predicts."""


def compare_predictions(cells: Cells) -> pd.DataFrame:
    """Set what was predicted before a run beside what it measured.

    Completed runs with both figures count; times, where they are valid.

    Returns
    -------
    DataFrame
        One row a cell, figure and method of prediction; cells that differ only in what decides
        neither memory nor time are one: `cell` (the first of them), the geometry, `label` (it, and
        settings that decide them), `figure` (a name of `PREDICTED`), `method`, `predicted`, `low`
        and `high` (means over the runs, which may know more one after the other), `measured` (mean;
        memory without cuBLAS's workspace), `n` (runs), `error_pct` (100 x (predicted / measured -
        1)), `n_ranged` and `n_within` (runs whose prediction had a range, and of those the ones
        that measured within it), `run_ids` and `sweep_dirs`.
    """
    cells = cells.by_cost()
    figures = valid_figures(cells.runs)
    # What cuBLAS works in is no part of a prediction.
    workspace = pd.to_numeric(cells.runs.reindex(columns=["workspace_gib"])["workspace_gib"])
    tensors = figures["peak_allocated_gib"] - workspace.astype(float).fillna(0)
    figures = figures.assign(peak_allocated_gib=tensors)
    rows = []
    for figure in PREDICTED:
        names = {part: f"predicted.{figure}.{part}" for part in ("value", "low", "high", "method")}
        if names["value"] not in cells.runs:
            continue
        predictions = cells.runs.reindex(columns=list(names.values())).set_axis(list(names), axis=1)
        numbers = predictions[["value", "low", "high"]].apply(pd.to_numeric).astype(float)
        runs = numbers.assign(
            method=predictions["method"],
            measured=figures[figure],
            cell=cells.runs["cell"],
            run_id=cells.runs["run_id"],
            sweep_dir=cells.runs["sweep_dir"],
        ).dropna(subset=["value", "measured"])
        runs["ranged"] = runs["low"].notna() & runs["high"].notna()
        runs["within"] = runs["ranged"] & runs["measured"].between(runs["low"], runs["high"])
        for (cell, method), cell_runs in runs.groupby(["cell", "method"], sort=True):
            predicted, measured = cell_runs["value"].mean(), cell_runs["measured"].mean()
            rows.append(
                {
                    "cell": cell,
                    "figure": figure,
                    "method": method,
                    "predicted": predicted,
                    "low": cell_runs["low"].mean(),
                    "high": cell_runs["high"].mean(),
                    "measured": measured,
                    "n": len(cell_runs),
                    "error_pct": 100 * (predicted / measured - 1) if measured > 0 else np.nan,
                    "n_ranged": int(cell_runs["ranged"].sum()),
                    "n_within": int(cell_runs["within"].sum()),
                    "run_ids": ";".join(cell_runs["run_id"]),
                    "sweep_dirs": ";".join(cell_runs["sweep_dir"].unique()),
                }
            )
    if not rows:
        return pd.DataFrame(columns=["cell", "figure", "method", "error_pct"])
    table = pd.DataFrame(rows)
    cuts = cells.table[list(GEOMETRY)].assign(label=cells.labels())
    return table.merge(cuts, left_on="cell", right_index=True).sort_values(
        ["figure", "method", "cell"], ignore_index=True
    )


def prediction_errors(table: pd.DataFrame) -> pd.DataFrame:
    """Sum up how far predictions were off.

    Parameters
    ----------
    table : DataFrame
        As `compare_predictions` returns it.

    Returns
    -------
    DataFrame
        One row a figure and method: `figure`, `method`, `cells`, `runs`, `median_error_pct` and
        `worst_error_pct` (of the absolute errors of cells), `worst` (its label), `n_ranged`
        and `n_within` (runs).
    """
    rows = []
    for (figure, method), rows_of_method in table.dropna(subset="error_pct").groupby(
        ["figure", "method"]
    ):
        errors = rows_of_method["error_pct"].abs()
        rows.append(
            {
                "figure": figure,
                "method": method,
                "cells": len(rows_of_method),
                "runs": rows_of_method["n"].sum(),
                "median_error_pct": errors.median(),
                "worst_error_pct": errors.max(),
                "worst": rows_of_method["label"].iloc[errors.argmax()],
                "n_ranged": rows_of_method["n_ranged"].sum(),
                "n_within": rows_of_method["n_within"].sum(),
            }
        )
    return pd.DataFrame(rows)
