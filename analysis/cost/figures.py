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
"""Settings of a figure."""
_OUTCOMES = {
    FIT: ACCENT,
    OUT: Look(MARK.colour, symbol=CROSS),
    SKIPPED: Look(GREY.colour, GREY.dark, hollow=True),
}


def memory_model_chart(model: MemoryModel, suffix: str, label: str) -> Chart | None:
    """Draw memory against the micro-batch by phase, with the fitted lines of one device."""
    phases = {n: p for n, p in model.phases.items() if n != "peak_allocated_gib"} or model.phases
    micros = model.measured["micro_batch_size"]
    if micros.nunique() < 2:
        return None
    scale = memory_scale([float(phase.cells["measured"].max()) for phase in phases.values()])
    grid = np.linspace(micros.min(), micros.max(), 60)
    lines, points, looks = [], [], dict[str, Look]()
    for (name, phase), look in zip(
        phases.items(), palette(MEMORY_PHASES[n] for n in phases).values(), strict=True
    ):
        series = MEMORY_PHASES[name]
        fitted = [phase.at(1, float(micro), 1).value * scale.factor for micro in grid]
        line = pd.DataFrame({"micro_batch_size": grid, "memory": fitted})
        lines.append(line.assign(series=series))
        cells = phase.cells[list(FACTORS)].assign(memory=phase.cells["measured"] * scale.factor)
        is_single = cells["gradient_accumulation_steps"].eq(1) & cells["data_parallel_size"].eq(1)
        other = f"{series}, other"
        points.append(cells.assign(series=np.where(is_single, series, other)))
        looks |= {series: look}
        looks |= {} if is_single.all() else {other: replace(look, hollow=True)}
    return Chart(
        f"memory_model{suffix}",
        "Memory by micro-batch, and its fit",
        "Memory of the fullest device by phase. Lines: fit for one device without accumulation; "
        f"hollow (other): cells with accumulation or more devices.{f' {label}.' if label else ''}",
        Axis({"micro_batch_size": _MICRO}),
        Axis({"memory": f"memory ({scale.unit})"}, from_zero=True),
        [Marks("line", pd.concat(lines)), Marks("point", pd.concat(points), size=20)],
        looks,
        tables=["tables/cost_models.csv"],
    )


def frontier_chart(rows: pd.DataFrame, table: pd.DataFrame) -> Chart | None:
    """Draw the outcome of each micro-batch, a line a setting; None for a single micro-batch."""
    if rows["micro_batch_size"].nunique() < 2:
        return None
    keys = ["group", "data_parallel_size"]
    devices = [count_text(int(number), "device") for number in table[keys[1]]]
    names = [*map("\n".join, zip(table["group_label"], devices, strict=True))]
    places = table[keys].assign(row=[name.strip() for name in names]).head(_MAX_ROWS)
    # A run that was not launched is no point beside one that was.
    order = rows.assign(later=rows["outcome"].eq(SKIPPED)).sort_values("later", kind="stable")
    cut = [*keys, "micro_batch_size"]
    is_shown = ~order["later"] | ~order.duplicated(cut)
    points = order[is_shown].drop_duplicates([*cut, "outcome"]).merge(places, on=keys)
    return Chart(
        "memory_frontier",
        "Where memory ends",
        "Micro-batches that fit a device's memory, that ran out of it, and that were not launched "
        "because a smaller one ran out, by setting.",
        Axis({"micro_batch_size": _MICRO}, kind="log", ticks=points["micro_batch_size"].tolist()),
        Axis({"row": ""}, kind="names"),
        [Marks("point", points.rename(columns={"outcome": "series"}), size=45)],
        {name: look for name, look in _OUTCOMES.items() if points["outcome"].eq(name).any()},
        tables=["tables/memory_frontier.csv"],
    )
