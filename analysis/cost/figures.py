"""Pictures of what a step costs: the fits of memory and time, predictions, and memory's end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from batchscape.analysis.cost.frontier import FIT, OUT, SKIPPED
from batchscape.analysis.cost.memory_model import MemoryModel
from batchscape.analysis.cost.table import FACTORS, MEMORY_PHASES
from batchscape.analysis.figures.chart import Axis, Chart, Look, Marks
from batchscape.analysis.figures.style import ACCENT, CROSS, GREY, MARK, palette
from batchscape.analysis.numbers import memory_scale
from batchscape.text import count_text

_MICRO = "micro-batch (samples a device)"
_MAX_ROWS = 24
"""Cells or settings of a figure."""


def memory_model_chart(model: MemoryModel, suffix: str, label: str) -> Chart | None:
    """Draw memory against the micro-batch by phase, with the fitted lines of one device."""
    phases = {n: p for n, p in model.phases.items() if n != "peak_allocated_gib"} or model.phases
    micros = sorted(model.measured["micro_batch_size"].unique())
    if len(micros) < 2:
        return None
    scale = memory_scale([float(phase.cells["measured"].max()) for phase in phases.values()])
    lines, points = [], []
    grid = np.linspace(micros[0], micros[-1], 60)
    for name, phase in phases.items():
        series = MEMORY_PHASES[name]
        fitted = [phase.at(1, float(m), 1).value * scale.factor for m in grid]
        line = pd.DataFrame({"micro_batch_size": grid, "memory": fitted})
        lines.append(line.assign(series=series))
        cells = phase.cells
        is_single = cells["gradient_accumulation_steps"].eq(1) & cells["data_parallel_size"].eq(1)
        points.append(
            cells[list(FACTORS)].assign(
                memory=cells["measured"] * scale.factor,
                series=np.where(is_single, series, f"{series}, other"),
            )
        )
    looks: dict[str, Look] = {}
    for name, look in palette(MEMORY_PHASES[n] for n in phases).items():
        looks |= {name: look, f"{name}, other": replace(look, hollow=True)}
    measured = pd.concat(points)
    drawn = {*measured["series"], *(MEMORY_PHASES[n] for n in phases)}
    group_text = f" {label}." if label else ""
    return Chart(
        f"memory_model{suffix}",
        "Memory by micro-batch, and its fit",
        "Memory of the fullest device by phase. Lines: fit for one device without accumulation; "
        f"hollow (other): cells with accumulation or more devices.{group_text}",
        Axis({"micro_batch_size": _MICRO}),
        Axis({"memory": f"memory ({scale.unit})"}, from_zero=True),
        [Marks("line", pd.concat(lines)), Marks("point", measured, size=20)],
        {name: look for name, look in looks.items() if name in drawn},
        tables=["tables/cost_models.csv"],
    )


def frontier_chart(rows: pd.DataFrame, table: pd.DataFrame) -> Chart | None:
    """Draw the outcome of each micro-batch, a line a setting; None for a single micro-batch."""
    if rows["micro_batch_size"].nunique() < 2:
        return None
    looks = {
        FIT: ACCENT,
        OUT: Look(MARK.colour, symbol=CROSS),
        SKIPPED: Look(GREY.colour, GREY.dark, hollow=True),
    }
    settings = table.head(_MAX_ROWS)
    keys = ["group", "data_parallel_size"]
    places = {
        tuple(row[keys]): f"{row['group_label']}\n{count_text(int(row[keys[1]]), 'device')}".strip()
        for _, row in settings.iterrows()
    }
    cells = zip(*(rows[key] for key in keys), strict=True)
    points = rows.assign(row=[places.get(cell, "") for cell in cells], series=rows["outcome"])
    points = points[points["row"].ne("")]
    points = points.drop_duplicates(["row", "micro_batch_size", "outcome"])
    launched = points[points["outcome"].ne(SKIPPED)].set_index(["row", "micro_batch_size"]).index
    keys_of_points = pd.MultiIndex.from_frame(points[["row", "micro_batch_size"]])
    points = points[points["outcome"].ne(SKIPPED) | ~keys_of_points.isin(launched)]
    drawn = set(points["series"])
    return Chart(
        "memory_frontier",
        "Where memory ends",
        "Micro-batches that fit a device's memory, that ran out of it, and that were not launched "
        "because a smaller one ran out, by setting.",
        Axis({"micro_batch_size": _MICRO}, kind="log", ticks=points["micro_batch_size"].tolist()),
        Axis({"row": ""}, kind="names"),
        [Marks("point", points, size=45)],
        {name: look for name, look in looks.items() if name in drawn},
        tables=["tables/memory_frontier.csv"],
    )
