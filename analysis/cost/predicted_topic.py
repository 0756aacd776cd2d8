"""What the report shows of predictions: how far they were off, cell by cell and in sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd
from matplotlib.figure import Figure

from batchscape.analysis.cells import Cells
from batchscape.analysis.cost.predicted import PREDICTED, compare_predictions, prediction_errors
from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.figures.style import COLUMN_IN, PALETTE, plain_ticks
from batchscape.analysis.numbers import Scale, memory_scale, significant, time_scale, unit_of
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Picture, Section
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
            "rate, are one. Predicted before the run began; measured: by runs that had ended, of "
            "the same cell too. "
            "error: of the prediction, in percent of what was measured. Times: of runs whose times "
            "are valid. Memory: without cuBLAS's workspace."
        ],
        hidden=["unit"],
    )


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
