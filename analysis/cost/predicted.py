"""Predictions of the plan against measurements, by cell."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells
from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.joins import column_of
from batchscape.analysis.numbers import significant, unit_of
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.text import count_text

PREDICTED = {"peak_allocated_gib": "peak memory", "step_time_s": "step time"}
"""Figures of a run that a plan predicts."""


def compare_predictions(cells: Cells) -> pd.DataFrame:
    """Compare predictions with measurements of completed runs, by cell, figure and method."""
    cells = cells.by_cost()
    figures = cells.figures
    # A prediction leaves out the workspace of cuBLAS.
    workspace = pd.to_numeric(column_of(cells.runs, "workspace_gib"))
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


def predicted_section(cells: Cells) -> Section | None:
    """Show how far predictions were off; None where no completed run has prediction and figure."""
    table = compare_predictions(cells)
    if table.empty:
        return None
    errors = prediction_errors(table)
    return Section("Predicted against measured", list(_answer(errors)), [_table(table)])


def _answer(errors: pd.DataFrame) -> Iterable[str]:
    for row in errors.to_dict("records"):
        median, worst = (significant(row[f"{name}_error_pct"], 2) for name in ("median", "worst"))
        text = (
            f"{PREDICTED[row['figure']].capitalize()}, predicted ({row['method']}), was off by "
            f"{worst} % at most ({row['worst']})"
        )
        if row["cells"] >= FEWEST:
            text += f", by {median} % in the median of {row['cells']} cells"
        if row["n_ranged"]:
            text += (
                f"; {row['n_within']} of {count_text(row['n_ranged'], 'run')} measured within the "
                "stated range"
            )
        yield f"{text}."


def _table(table: pd.DataFrame) -> Table:
    units = table["figure"].map(unit_of)
    return Table(
        "predicted",
        "Predicted against measured",
        table.assign(unit=units),
        [
            Column("figure", words=PREDICTED, is_left=True),
            Column("label", "geometry", is_left=True),
            Column("predicted", "predicted [range]", "", 3, "low", "high", units="unit"),
            Column("measured", format=3, units="unit"),
            Column("error_pct", "error", "%", 2),
            Column("n", "runs"),
            Column("method", "by"),
        ],
        notes=[
            "Cells that differ only in what decides neither memory nor time, such as the learning "
            "rate, are one. Predictions are from before the run; those by measured runs may rest "
            "on runs of the same cell. error: of the prediction, in percent of the measurement. "
            "Times: of runs whose times are valid. Memory: without cuBLAS's workspace."
        ],
        hidden=["unit"],
    )
