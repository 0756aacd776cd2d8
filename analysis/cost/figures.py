"""Figures of memory against the micro-batch, and of step time as measured against as fitted."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from batchscape.analysis.cost.memory_model import MemoryModel
from batchscape.analysis.cost.step_time import StepTimeModel
from batchscape.analysis.cost.table import MEMORY_PHASES
from batchscape.analysis.figures.style import COLUMN_IN, PALETTE, name_group
from batchscape.analysis.numbers import TIMES, memory_scale, time_scale

__all__ = ["draw_memory_model", "draw_step_time_model"]

_MARKERS = "osD^vPX"
_MAX_CELLS = 24


def draw_memory_model(model: MemoryModel, label: str = "") -> Figure | None:
    """Draw memory against the micro-batch by phase, with the fitted lines of one device.

    Parameters
    ----------
    label : str
        Which group of runs it is of, where there are several.

    Returns
    -------
    Figure or None
        None where all cells have one micro-batch.
    """
    shown = {n: p for n, p in model.phases.items() if n != "peak_allocated_gib"} or model.phases
    micros = sorted(model.measured["micro_batch_size"].unique())
    if len(micros) < 2:
        return None
    largest = [float(phase.cells["measured"].max()) for phase in shown.values()]
    scale = memory_scale(largest)
    figure = Figure((COLUMN_IN, 2.9), layout="constrained")
    axes = figure.subplots()
    grid = np.linspace(micros[0], micros[-1], 60)
    for index, (name, phase) in enumerate(shown.items()):
        style: dict[str, Any] = {"color": PALETTE[index % 7]}
        cells = phase.cells
        plain = cells["gradient_accumulation_steps"].eq(1) & cells["data_parallel_size"].eq(1)
        for rows, fill in ((cells[plain], style["color"]), (cells[~plain], "white")):
            axes.plot(
                rows["micro_batch_size"],
                rows["measured"] * scale.factor,
                linestyle="none",
                marker=_MARKERS[index % 7],
                markersize=4,
                markerfacecolor=fill,
                clip_on=False,
                **style,
            )
        line = [phase.at(1, float(m), 1).value * scale.factor for m in grid]
        axes.plot(grid, line, linewidth=1, **style)
        axes.plot([], [], marker=_MARKERS[index % 7], label=MEMORY_PHASES[name], **style)
    axes.set_xlabel("micro-batch (samples a device)")
    axes.set_ylabel(f"memory ({scale.unit})")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2)
    name_group(figure, label)
    return figure


def draw_step_time_model(model: StepTimeModel, label: str = "") -> Figure:
    """Draw the time of an optimizer step over its samples, cell by cell, measured and fitted.

    Parameters
    ----------
    label : str
        Which group of runs it is of, where there are several.
    """
    cells = model.cells.head(_MAX_CELLS).iloc[::-1].reset_index(drop=True)
    scale = time_scale(cells["measured"])
    figure = Figure((COLUMN_IN, 1.15 + 0.21 * len(cells)), layout="constrained")
    axes = figure.subplots()
    for name, marker, colour in (("measured", "o", PALETTE[0]), ("fitted", "|", PALETTE[1])):
        size, width = (4, 1.0) if marker == "o" else (7, 2.0)
        axes.plot(
            cells[name] * scale.factor,
            cells.index,
            linestyle="none",
            marker=marker,
            markersize=size,
            markeredgewidth=width,
            color=colour,
            clip_on=False,
            label=name,
        )
    axes.plot(
        cells["left_out"] * scale.factor,
        cells.index,
        linestyle="none",
        marker="x",
        markersize=4,
        color=PALETTE[2],
        clip_on=False,
        label="from the other cells",
    )
    names = cells[["data_parallel_size", "micro_batch_size", "gradient_accumulation_steps"]]
    labels = [TIMES.join(map(str, row)) for row in names.to_numpy()]
    axes.set_yticks(cells.index, labels)
    axes.set_ylim(-0.7, len(cells) - 0.3)
    # No marker lies on the right edge.
    drawn = cells[["measured", "fitted", "left_out"]].to_numpy(dtype=float) * scale.factor
    axes.set_xlim(0, 1.08 * np.nanmax(drawn))
    axes.set_xlabel(f"time of an optimizer step ({scale.unit})")
    axes.set_title(f"devices {TIMES} micro {TIMES} accumulation", loc="left", fontsize=7)
    figure.legend(loc="outside lower center", ncols=3, handletextpad=0.3, columnspacing=1.0)
    name_group(figure, label)
    return figure
