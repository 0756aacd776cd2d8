"""The largest micro-batch that fits, by setting, in the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.cost.capacity import LIMITED, PEAK_FIGURES
from batchscape.analysis.cost.frontier import FIT, OUT, SKIPPED, frontier_rows, memory_frontier
from batchscape.analysis.figures.chart import Axis, Chart, Look, Marks
from batchscape.analysis.figures.style import ACCENT, CROSS, GREY, MARK
from batchscape.analysis.joins import column_of
from batchscape.analysis.numbers import memory_scale, significant
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.text import count_text

_MAX_SENTENCES = 6
"""Settings in the text; the table has all."""
_MAX_ROWS = 24
"""Settings of a figure."""
_OUTCOMES = {
    FIT: ACCENT,
    OUT: Look(MARK.colour, symbol=CROSS),
    SKIPPED: Look(GREY.colour, GREY.dark, hollow=True),
}


def frontier_section(cells: Cells) -> Section | None:
    """Show which micro-batches fit; None where no run ran out of memory and none had a limit."""
    rows = frontier_rows(cells)
    limited = column_of(cells.runs, LIMITED).notna().any()
    if rows.empty or not (limited or rows["outcome"].ne(FIT).any()):
        return None
    table = memory_frontier(rows)
    frontiers = table.to_dict("records")
    answer = [f"{_where(row)}{_sentence(row)}." for row in frontiers[:_MAX_SENTENCES]]
    if len(table) > _MAX_SENTENCES:
        are = count_text(len(table) - _MAX_SENTENCES, "more setting is", "more settings are")
        answer.append(f"{are} in the table.")
    chart = _chart(rows, table)
    view = Table(
        "memory_frontier",
        "Where memory ends",
        table,
        [
            Column("group_label", "group", is_left=True),
            Column("data_parallel_size", "devices", is_left=True),
            Column("last_fit", format=".0f"),
            Column("first_out", "first out of memory", format=".0f"),
            Column("memory_gib", "memory", "GiB", 3),
            Column("peak_gib", "peak at last fit", "GiB", 3),
            Column("margin_gib", "margin", "GiB", 3),
            Column("margin_pct", "margin", "%", 2),
            Column("n_fit", "fit"),
            Column("n_out", "out"),
            Column("n_skipped", "not launched"),
        ],
        footnotes=[table["note"].replace("", None)],
        notes=[
            "last fit: largest micro-batch that fit and is smaller than every one that ran out of "
            "memory; first out of memory: smallest that did. fit, out, not launched: runs of each "
            "outcome; a run is not launched where a smaller one ran out. Memory is of a rank: a "
            "limit that emulates a smaller device (device.memory_limit_gib), else all of its "
            "device or its part of the host.",
            "peak: largest of the runs at the last fit"
            + "".join(f", {PEAK_FIGURES[name]}" for name in table["peak_figure"].dropna().unique())
            + ". margin: the rest.",
        ],
    )
    return Section(
        "Where memory ends",
        answer,
        [view],
        [chart] if chart else [],
        [f"{_where(row)}{row['note']}." for row in frontiers if not row["is_monotone"]],
    )


def _where(row: Mapping[Any, Any]) -> str:
    text = f"On {count_text(int(row['data_parallel_size']), 'device')}"
    return f"{text}, {row['group_label']}: " if row["group_label"] else f"{text}: "


def _sentence(row: Mapping[Any, Any]) -> str:
    if not row["identified"]:
        why = row["note"].partition(";")[0]
        return f"the largest micro-batch that fits is {why}"
    text = (
        f"micro-batch {row['last_fit']:.0f} is the last that fit, {row['first_out']:.0f} the first "
        "that ran out of memory"
    )
    if math.isnan(row["margin_gib"]):
        return text
    scale = memory_scale([row["memory_gib"]])
    margin, memory = (
        significant(row[name] * scale.factor, 3) for name in ("margin_gib", "memory_gib")
    )
    return (
        f"{text}; at {row['last_fit']:.0f}, {margin} of {memory} {scale.unit} "
        f"({row['margin_pct']:.2g} %) were left"
    )


def _chart(rows: pd.DataFrame, table: pd.DataFrame) -> Chart | None:
    """Draw the outcome of each micro-batch, a line a setting; None for a single micro-batch."""
    if rows["micro_batch_size"].nunique() < 2:
        return None
    keys = ["group", "data_parallel_size"]
    devices = [count_text(int(number), "device") for number in table[keys[1]]]
    names = [*map("\n".join, zip(table["group_label"], devices, strict=True))]
    places = table[keys].assign(row=[name.strip() for name in names]).head(_MAX_ROWS)
    cut = [*keys, "micro_batch_size", "outcome"]
    points = places.merge(rows.drop_duplicates(cut), on=keys)
    return Chart(
        "memory_frontier",
        "Where memory ends",
        "Micro-batches that fit a device's memory, that ran out of it, and that were not launched "
        "because a smaller one ran out, by setting.",
        Axis(
            {"micro_batch_size": "micro-batch (samples a device)"},
            kind="log",
            ticks=points["micro_batch_size"].tolist(),
        ),
        Axis({"row": ""}, kind="names"),
        [Marks("point", points.rename(columns={"outcome": "series"}), size=45)],
        {name: look for name, look in _OUTCOMES.items() if points["outcome"].eq(name).any()},
        tables=["tables/memory_frontier.csv"],
    )
