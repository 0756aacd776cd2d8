"""Errors of predictions in the report."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.cost.predicted import PREDICTED, compare_predictions, prediction_errors
from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.numbers import significant, unit_of
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.text import count_text


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
