"""What the report shows of predictions: how far they were off, cell by cell and in sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from batchscape.analysis.cells import Cells
from batchscape.analysis.cost.predicted import PREDICTED, compare_predictions, prediction_errors
from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.figures.style import COLUMN_IN, PALETTE, plain_ticks
from batchscape.analysis.numbers import Scale, memory_scale, significant, time_scale
from batchscape.analysis.report.grids import columns_grid
from batchscape.analysis.report.topic import Picture, Section, TableView
from batchscape.text import count_text

__all__ = ["predicted_section"]


def predicted_section(cells: Cells) -> Section | None:
    """Compare what was predicted with what was measured.

    Returns
    -------
    Section or None
        None where no completed run has both.
    """
    table = compare_predictions(cells)
    if table.empty:
        return None
    errors = prediction_errors(table)
    caption = (
        "Predicted before the runs against measured, a point a cell; bars: the stated range. "
        "On the line both are equal."
    )
    return Section(
        "Predicted against measured",
        list(_answer(errors)),
        [_table(table)],
        [Picture("predicted", caption, _drawn(table))],
        curves={"prediction_errors": errors},
    )


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


def _scales(table: pd.DataFrame) -> Mapping[str, Scale]:
    return {
        figure: (memory_scale if figure.endswith("_gib") else time_scale)(
            table.loc[table["figure"] == figure, ["predicted", "measured"]].to_numpy().ravel()
        )
        for figure in table["figure"].unique()
    }


def _table(table: pd.DataFrame) -> TableView:
    scales = _scales(table)
    records: list[dict[Any, Any]] = table.to_dict("records")

    def text(row: dict[Any, Any], name: str) -> str:
        return significant(row[name] * scales[row["figure"]].factor, 3)

    def predicted(row: dict[Any, Any]) -> str:
        if pd.isna(row["low"]) or pd.isna(row["high"]):
            return text(row, "predicted")
        return f"{text(row, 'predicted')} [{text(row, 'low')}, {text(row, 'high')}]"

    grid = columns_grid(
        [
            ("figure", table["figure"].map(PREDICTED)),
            ("geometry", table["label"]),
        ],
        [
            ("predicted [range]", map(predicted, records)),
            ("measured", [text(row, "measured") for row in records]),
            ("unit", [scales[row["figure"]].unit for row in records]),
            ("error (%)", [significant(row["error_pct"], 2) for row in records]),
            ("runs", table["n"].astype(str)),
            ("by", table["method"]),
        ],
        notes=[
            "Cells that differ only in what decides neither memory nor time, such as the learning "
            "rate, are one. Predicted before the run began; measured: by runs that had ended, of "
            "the same cell too. "
            "error: of the prediction, in percent of what was measured. Times: of runs whose times "
            "are valid. Memory: without cuBLAS's workspace."
        ],
    )
    return TableView("predicted", "Predicted against measured", table, grid)


def _drawn(table: pd.DataFrame) -> Figure:
    scales = _scales(table)
    figure = Figure((COLUMN_IN, 2.5 * len(scales)), layout="constrained")
    panels = figure.subplots(len(scales), 1, squeeze=False)[:, 0]
    for axes, (name, scale) in zip(panels, scales.items(), strict=True):
        own = table[table["figure"] == name]
        for index, (method, rows) in enumerate(own.groupby("method")):
            colour = PALETTE[index % len(PALETTE)]
            x, y = rows["measured"] * scale.factor, rows["predicted"] * scale.factor
            low = rows["low"].fillna(rows["predicted"]) * scale.factor
            high = rows["high"].fillna(rows["predicted"]) * scale.factor
            axes.vlines(x, low, high, color=colour, linewidth=0.8, alpha=0.6)
            axes.plot(x, y, "o", color=colour, markersize=4, label=str(method))
        ends = [
            own[["measured", "predicted"]].min().min(),
            own[["measured", "predicted"]].max().max(),
        ]
        ends = [end * scale.factor * room for end, room in zip(ends, (0.8, 1.25), strict=True)]
        axes.plot(ends, ends, color="#555555", linewidth=0.8, zorder=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(ends)
        for axis in (axes.xaxis, axes.yaxis):
            plain_ticks(axis)
        axes.set_xlabel(f"measured {PREDICTED[name]} ({scale.unit})")
        axes.set_ylabel(f"predicted ({scale.unit})")
        axes.legend(loc="lower right")
    return figure
