"""Figures of memory, step time and throughput: one row a cell, a point a run.

Cells that differ only in what decides neither memory nor time, such as the learning rate, are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from batchscape.analysis.cells import Cells, geometry_label
from batchscape.analysis.commands import untimed_cells
from batchscape.analysis.comparison import valid_figures
from batchscape.analysis.cost.table import MEMORY_PHASES
from batchscape.analysis.figures.style import COLUMN_IN, Look, tint
from batchscape.analysis.numbers import memory_scale, time_scale

__all__ = ["MAX_BARS", "draw_memory", "draw_processor_time", "draw_step_time", "draw_throughput"]

MAX_BARS = 40
"""Cells of a figure; further ones are left to the tables."""

_TIME_PHASES = {
    "data_s": "data",
    "forward_backward_s": "forward + backward",
    "exchange_s": "exchange",
    "optimizer_s": "optimizer",
}
_SPENT = "processor_time_s"
_GREY = "#555555"
_POINT: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 2.5,
    "color": "black",
    "alpha": 0.6,
}


def draw_memory(cells: Cells, look: Mapping[str, Look]) -> Figure | None:
    """Draw peak allocated memory by phase of a run, maximum over ranks.

    Parameters
    ----------
    look : mapping
        As `style.looks` returns it.

    Returns
    -------
    Figure or None
        None where no completed run has such a figure.
    """
    phases = list(MEMORY_PHASES)[:4]
    cells = cells.by_cost()
    figures, shown = _shown(cells, phases)
    colours = _colours(cells, look)
    if not shown:
        return None
    scale = memory_scale(figures[phases].to_numpy().ravel())
    figure, axes = _rows(cells, shown, bars=len(phases))
    height = 0.8 / len(phases)
    for index, phase in enumerate(phases):
        offset = (index - (len(phases) - 1) / 2) * height
        for position, cell in enumerate(shown):
            values = figures.loc[figures["cell"] == cell, phase].dropna() * scale.factor
            colour = tint(colours[cell], _strength(index, len(phases)))
            axes.barh(position + offset, values.mean() if len(values) else 0, height, color=colour)
            axes.plot(values, np.full(len(values), position + offset), **_POINT)
    axes.set_xlabel(f"allocated memory ({scale.unit})")
    _phase_legend(figure, [MEMORY_PHASES[phase] for phase in phases])
    return figure


def draw_step_time(cells: Cells, look: Mapping[str, Look]) -> Figure | None:
    """Draw the median step time, split into its phases; a point is the whole of one run.

    Parameters and result are those of `draw_memory`.
    """
    phases = list(_TIME_PHASES)
    cells = cells.by_cost()
    figures, shown = _shown(cells, ["step_time_s"])
    colours = _colours(cells, look)
    if not shown:
        return None
    scale = time_scale(figures["step_time_s"])
    figure, axes = _rows(cells, shown)
    for position, cell in enumerate(shown):
        rows = figures[figures["cell"] == cell]
        start = 0.0
        for index, phase in enumerate(phases):
            length = rows[phase].mean() * scale.factor if rows[phase].notna().any() else 0.0
            colour = tint(colours[cell], _strength(index, len(phases)))
            axes.barh(position, length, 0.7, left=start, color=colour)
            start += length
        _draw_runs(axes, rows["step_time_s"] * scale.factor, position, cells, cell)
    axes.set_xlabel(f"median optimizer step ({scale.unit})")
    _phase_legend(figure, list(_TIME_PHASES.values()))
    return figure


def draw_processor_time(cells: Cells, look: Mapping[str, Look]) -> Figure | None:
    """Draw the processor time of a step, hatched: of the cells alone of which no time counts.

    Parameters and result are those of `draw_memory`.
    """
    cells = cells.by_cost()
    own = untimed_cells(cells.runs)
    own = own.assign(value=pd.to_numeric(own.reindex(columns=[_SPENT])[_SPENT]).astype(float))
    own = own.dropna(subset="value")
    shown = sorted(own["cell"].unique())[:MAX_BARS]
    if not shown:
        return None
    colours = _colours(cells, look)
    scale = time_scale(own["value"])
    figure, axes = _rows(cells, shown)
    for position, cell in enumerate(shown):
        values = own.loc[own["cell"] == cell, "value"] * scale.factor
        axes.barh(
            position, values.mean(), 0.7, edgecolor=colours[cell], facecolor="none", hatch="////"
        )
        axes.plot(values, np.full(len(values), position), **_POINT)
    axes.set_xlabel(f"disturbed: processor time of a step ({scale.unit})")
    return figure


def draw_throughput(cells: Cells, look: Mapping[str, Look]) -> Figure | None:
    """Draw throughput over all devices: bars are means, points are runs.

    Parameters and result are those of `draw_memory`.
    """
    cells = cells.by_cost()
    figures, shown = _shown(cells, ["tokens_per_s", "samples_per_s"])
    colours = _colours(cells, look)
    if not shown:
        return None
    has = figures[figures["cell"].isin(shown)].groupby("cell")[["tokens_per_s", "samples_per_s"]]
    tokens, samples = (count > 0 for _, count in has.count().items())
    # All bars have one unit, which each must have.
    name = "tokens_per_s" if (tokens | ~samples).all() else "samples_per_s"
    figure, axes = _rows(cells, shown)
    for position, cell in enumerate(shown):
        values = figures.loc[figures["cell"] == cell, name]
        mean = values.mean() if values.notna().any() else 0
        axes.barh(position, mean, 0.7, color=colours[cell])
        _draw_runs(axes, values, position, cells, cell)
    axes.set_xlabel(f"{name.removesuffix('_per_s')}/s, all devices")
    return figure


def _shown(cells: Cells, names: Sequence[str]) -> tuple[pd.DataFrame, list[int]]:
    """Return the figures, and the cells with completed runs; none if nothing was measured."""
    figures = valid_figures(cells.runs)
    if not figures[list(names)].notna().any(axis=None):
        return figures, []
    return figures, sorted(figures["cell"].unique())[:MAX_BARS]


def _rows(cells: Cells, shown: Sequence[int], bars: int = 2) -> tuple[Figure, Axes]:
    """Make a figure with one labelled row a cell, the first on top."""
    labels = [fill(label, 24) for label in cells.labels().loc[list(shown)]]
    lines = max(label.count("\n") + 1.5 for label in labels)
    height = 0.9 + len(shown) * 0.13 * max(bars + 0.5, lines)
    figure = Figure(figsize=(COLUMN_IN, height), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(shown)), labels)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)
    return figure, axes


def _draw_runs(
    axes: Axes, values: pd.Series[float], position: int, cells: Cells, cell: int
) -> None:
    """Draw a point a run, or say why there is none."""
    if values.notna().any():
        axes.plot(values, np.full(len(values), position), **_POINT)
        return
    runs = cells.runs[(cells.runs["cell"] == cell) & cells.runs["status"].eq("completed")]
    notes = runs["timing_note"].dropna()
    text = fill(notes.iloc[0] if len(notes) else "not measured", 34)
    place = axes.get_yaxis_transform()
    axes.text(0.02, position, text, va="center", fontsize=6.5, color=_GREY, transform=place)


def _phase_legend(figure: Figure, names: Sequence[str]) -> None:
    """Explain the shades once, in grey, since every colour has them."""
    handles = [
        Patch(color=tint(_GREY, _strength(index, len(names))), label=name)
        for index, name in enumerate(names)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, handlelength=1.2)


def _strength(index: int, total: int) -> float:
    """Shade of a phase: later ones are stronger."""
    return 0.3 + 0.7 * index / (total - 1)


def _colours(cells: Cells, look: Mapping[str, Look]) -> dict[int, str]:
    labels = geometry_label(cells.table)
    return {cell: look[labels[cell]].colour for cell in cells.table.index if labels[cell] in look}
