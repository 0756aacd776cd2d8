"""Predictions of the plan against measurements, by cell."""

from __future__ import annotations

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
_PARTS = {"value": "predicted", "low": "low", "high": "high", "method": "method"}
"""Of a prediction, and their columns."""
_NUMBERS = ["predicted", "low", "high"]


def compare_predictions(cells: Cells) -> pd.DataFrame:
    """Compare predictions with measurements of completed runs, by cell, figure and method."""
    cells = cells.by_cost()
    figures = cells.figures
    # A prediction leaves out the workspace of cuBLAS.
    workspace = pd.to_numeric(column_of(cells.runs, "workspace_gib")).astype(float).fillna(0)
    tensors = figures["peak_allocated_gib"] - workspace
    figures = figures.assign(peak_allocated_gib=tensors)
    parts = []
    for figure in PREDICTED:
        names = {f"predicted.{figure}.{old}": new for old, new in _PARTS.items()}
        part = cells.runs.reindex(columns=list(names)).set_axis(list(names.values()), axis=1)
        part[_NUMBERS] = part[_NUMBERS].apply(pd.to_numeric).astype(float)
        parts.append(part.assign(figure=figure, measured=figures[figure]))
    runs = pd.concat(parts).join(cells.runs[["cell", "run_id", "sweep_dir"]])
    runs = runs.dropna(subset=["predicted", "measured"])
    is_ranged = runs["low"].notna() & runs["high"].notna()
    is_within = is_ranged & runs["measured"].between(runs["low"], runs["high"])
    runs = runs.assign(n_ranged=is_ranged, n_within=is_within)
    table = runs.groupby(["figure", "method", "cell"]).agg(
        **{name: (name, "mean") for name in (*_NUMBERS, "measured")},
        n=("run_id", "size"),
        n_ranged=("n_ranged", "sum"),
        n_within=("n_within", "sum"),
        run_ids=("run_id", ";".join),
        sweep_dirs=("sweep_dir", lambda dirs: ";".join(dirs.unique())),
    )
    error = 100 * (table["predicted"] / table["measured"].where(table["measured"] > 0) - 1)
    cuts = cells.table[list(GEOMETRY)].assign(label=cells.labels())
    return table.assign(error_pct=error).reset_index().join(cuts, on="cell")


def predicted_section(cells: Cells) -> Section | None:
    """Show how far predictions were off; None where no completed run has prediction and figure."""
    table = compare_predictions(cells)
    if table.empty:
        return None
    answer = []
    for (figure, method), rows in table.dropna(subset="error_pct").groupby(["figure", "method"]):
        errors = rows["error_pct"].abs()
        text = f"{PREDICTED[str(figure)].capitalize()}, predicted ({method}), was off by "
        worst, median = (significant(error, 2) for error in (errors.max(), errors.median()))
        text += f"{worst} % at most ({rows['label'].iloc[int(errors.argmax())]})"
        if len(rows) >= FEWEST:
            text += f", by {median} % in the median of {len(rows)} cells"
        n_ranged = int(rows["n_ranged"].sum())
        if n_ranged:
            runs = count_text(n_ranged, "run")
            text += f"; {rows['n_within'].sum()} of {runs} measured within the stated range"
        answer.append(f"{text}.")
    return Section("Predicted against measured", answer, [_table(table)])


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
