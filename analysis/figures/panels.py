"""Figures of several panels, one for each set of settings that cells are compared under."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from batchscape.analysis.cells import Cells
from batchscape.analysis.figures.style import COLUMN_IN, PAGE_IN

__all__ = ["context_title", "lay_out"]

_NO_HEIGHT = 0.01
"""Axes must have some."""


def lay_out(
    count: int, heights: Sequence[float], whole: Sequence[bool] = ()
) -> tuple[Figure, list[list[Axes]]]:
    """Lay out panels in rows of three at most.

    Parameters
    ----------
    heights : sequence of float, shape (n,)
        Of the axes of one panel from top to bottom, in inches.
    whole : sequence of bool, shape (count,)
        Panels that need more than their first axes; a row without any has no room for others.
        Empty: all of them.

    Returns
    -------
    Figure
    list of list of Axes
        For each panel its n axes. The first is shown, the others are hidden.
    """
    n_columns = 2 if count == 4 else min(count, 3)
    needed = list(whole or [True] * count)
    rows = [needed[start : start + n_columns] for start in range(0, count, n_columns)]
    ratios = [
        height if layer == 0 or any(row) else _NO_HEIGHT
        for row in rows
        for layer, height in enumerate(heights)
    ]
    size = (COLUMN_IN if n_columns == 1 else PAGE_IN, sum(ratios) + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(ratios), n_columns, squeeze=False, height_ratios=ratios)
    for axes in grid.flat:
        axes.set_visible(False)
    layers = [list(grid[start :: len(heights)].flat)[:count] for start in range(len(heights))]
    for axes in layers[0]:
        axes.set_visible(True)
    return figure, [list(panel) for panel in zip(*layers, strict=True)]


def context_title(cells: Cells, cell: int) -> str:
    """Name the settings of a cell that its panel stands for, in short lines."""
    row = cells.table.loc[cell]
    parts = [fill(f"{cells.label_of(name)} {row[name]}", 32) for name in cells.contexts]
    whole = ", ".join(parts)
    return whole if len(whole) <= 32 else "\n".join(parts)
