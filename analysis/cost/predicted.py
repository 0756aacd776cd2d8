"""Predictions of the plan against measurements, by cell."""

from __future__ import annotations

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells

PREDICTED = {"peak_allocated_gib": "peak memory", "step_time_s": "step time"}
"""Figures of a run that a plan predicts."""


def compare_predictions(cells: Cells) -> pd.DataFrame:
    """Compare predictions with measurements of completed runs, by cell, figure and method."""
    cells = cells.by_cost()
    figures = cells.figures
    # A prediction leaves out the workspace of cuBLAS.
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
        for (cell, method), group in runs.groupby(["cell", "method"], sort=True):
            predicted, measured = group["value"].mean(), group["measured"].mean()
            rows.append(
                {
                    "cell": cell,
                    "figure": figure,
                    "method": method,
                    "predicted": predicted,
                    "low": group["low"].mean(),
                    "high": group["high"].mean(),
                    "measured": measured,
                    "n": len(group),
                    "error_pct": 100 * (predicted / measured - 1) if measured > 0 else np.nan,
                    "n_ranged": int(group["ranged"].sum()),
                    "n_within": int(group["within"].sum()),
                    "run_ids": ";".join(group["run_id"]),
                    "sweep_dirs": ";".join(group["sweep_dir"].unique()),
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
    """Return the median and worst error of the cells, by figure and method."""
    rows = []
    for (figure, method), group in table.dropna(subset="error_pct").groupby(["figure", "method"]):
        errors = group["error_pct"].abs()
        rows.append(
            {
                "figure": figure,
                "method": method,
                "cells": len(group),
                "runs": group["n"].sum(),
                "median_error_pct": errors.median(),
                "worst_error_pct": errors.max(),
                "worst": group["label"].iloc[errors.argmax()],
                "n_ranged": group["n_ranged"].sum(),
                "n_within": group["n_within"].sum(),
            }
        )
    return pd.DataFrame(rows)
