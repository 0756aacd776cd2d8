"""The figure of the gradient noise scale over the training."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from batchscape.analysis.cells import Cells, geometry_label
from batchscape.analysis.figures.panels import context_title, lay_out
from batchscape.analysis.figures.style import Look, plain_ticks

__all__ = ["draw_noise_scale"]


def draw_noise_scale(cells: Cells, curves: pd.DataFrame, look: Mapping[str, Look]) -> Figure | None:
    """Draw the noise scale against samples seen, with its interval at every point.

    Cells whose settings differ get panels of their own.

    Parameters
    ----------
    curves : DataFrame
        As `noise_scale_curves` returns it.
    look : mapping
        As `style.looks` returns it.

    Returns
    -------
    Figure or None
        None where no cell has intervals at two points: there is no curve to draw.
    """
    drawn = curves[curves["estimate"].notna() & np.isfinite(curves["high"])]
    if not drawn["cell"].duplicated().any():
        return None
    labels = geometry_label(cells.table)
    context = cells.context_of()
    parts = [rows for _, rows in drawn.groupby(context.reindex(drawn["cell"]).to_numpy())]
    figure, panels = lay_out(len(parts), [2.2])
    # Intervals may reach far beyond the points.
    low, high = drawn["estimate"].min() / 3, drawn["estimate"].max() * 3
    for (axes,), rows in zip(panels, parts, strict=True):
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        plain_ticks(axes.yaxis)
        for cell, own in rows.groupby("cell"):
            _draw_curve(axes, own, look[labels[cell]])
        if len(parts) > 1:
            axes.set_title(context_title(cells, int(rows["cell"].iloc[0])))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("samples")
    panels[0][0].set_ylabel("gradient noise scale (samples)")
    shown = set(labels[drawn["cell"].unique()])
    handles = [
        Line2D(
            [],
            [],
            color=look[name].colour,
            linestyle=look[name].dash,
            marker=look[name].marker,
            markersize=3,
            label=name,
        )
        for name in look
        if name in shown
    ]
    columns = 3 if len(parts) == 1 else 6
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=3.0)
    return figure


def _draw_curve(axes: Axes, rows: pd.DataFrame, look: Look) -> None:
    low, high = axes.get_ylim()
    axes.plot(
        rows["samples"],
        rows["estimate"],
        color=look.colour,
        linestyle=look.dash,
        linewidth=look.width,
        marker=look.marker,
        markersize=3,
    )
    starts, ends = rows["low"].clip(lower=low), rows["high"].clip(upper=high)
    if len(rows) == 1:
        axes.vlines(rows["samples"], starts, ends, color=look.colour, alpha=0.5, linewidth=0.8)
    else:
        axes.fill_between(rows["samples"], starts, ends, color=look.colour, alpha=0.12, linewidth=0)
