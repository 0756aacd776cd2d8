"""Figures of equivalence: paired differences against the margin, and differences over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from batchscape.analysis.cells import Cells, geometry_label, setting_label, setting_texts
from batchscape.analysis.figures.style import COLUMN_IN, PAGE_IN, Look, loss_axis

__all__ = ["MOST_PANELS", "MOST_ROWS", "draw_divergence", "draw_equivalence"]

MOST_ROWS = 40
"""Decompositions in one figure at most; those with the largest differences are drawn."""
MOST_PANELS = 6
"""Families in one figure at most."""

_NAME_WIDTH = 48
"""Letters of a line of a name; names longer than half of it need the width of a page."""

_COLOURS = {"equivalent": "#009E73", "different": "#D55E00", "not identified": "#56B4E9"}
_GREY = "#777777"


def draw_equivalence(cells: Cells, table: pd.DataFrame, pairs: pd.DataFrame) -> Figure | None:
    """Draw the paired differences of one quantity on a logarithmic axis, with the margin.

    Parameters
    ----------
    table : DataFrame
        As `judge_equivalence` returns it, of one quantity.
    pairs : DataFrame
        As `paired_differences` returns them, of the same.

    Returns
    -------
    Figure or None
        None where no difference is finite.
    """
    table = table.nlargest(MOST_ROWS, "smallest_margin", keep="first").sort_values("cell")
    pairs = pairs[pairs["cell"].isin(table["cell"]) & np.isfinite(pairs["difference"])]
    if pairs.empty or table.empty:
        return None
    names = [fill(name, _NAME_WIDTH) for name in _names(cells, table["cell"])]
    lines = 1 + max(name.count("\n") for name in names)
    width = COLUMN_IN if max(map(len, names)) <= _NAME_WIDTH / 2 else PAGE_IN
    height = 1.35 + 0.19 * len(table) * max(1, 0.75 * lines)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    sizes = [*pairs["difference"].abs(), *table["margin"].dropna(), *table["seed_sd"].dropna()]
    # Where the axis begins, at which differences of exactly zero are drawn.
    floor = float(min(size for size in sizes if size > 0)) / 3
    for y, row in enumerate(table.to_dict("records")):
        own = pairs.loc[pairs["cell"] == row["cell"], "difference"].abs()
        colour = _COLOURS[row["verdict"]]
        axes.plot(own.clip(lower=floor), np.full(len(own), y), "o", color=colour, markersize=3.5)
        axes.plot([row["seed_sd"]], [y], "D", color=_GREY, markersize=3.5, markerfacecolor="none")
        if np.isfinite(row["smallest_margin"]):
            end = max(row["smallest_margin"], floor)
            axes.plot([floor, end], [y, y], color=colour, linewidth=1.0, alpha=0.6)
            axes.plot([end], [y], "|", color=colour, markersize=8, markeredgewidth=1.4)
        axes.plot([row["margin"]] * 2, [y - 0.5, y + 0.5], "--", color="black", linewidth=0.8)
    axes.set_yticks(range(len(table)), names)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.set_xlim(left=floor / 2)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(loss_axis("|difference| of the final loss", cells.runs))
    handles = [
        Line2D([], [], color="black", linestyle="--", linewidth=0.8, label="margin"),
        Line2D([], [], color=_GREY, marker="D", linestyle="", markerfacecolor="none",
               markersize=3.5, label="sd between seeds"),
        *(
            Line2D([], [], color=colour, marker="o", markersize=3.5, linewidth=1.0, label=verdict)
            for verdict, colour in _COLOURS.items()
            if table["verdict"].eq(verdict).any()
        ),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def draw_divergence(
    cells: Cells,
    pairs: pd.DataFrame,
    spread: pd.DataFrame,
    margin: float,
    look: Mapping[str, Look],
) -> Figure | None:
    """Draw how far the training losses of decompositions are apart over the optimizer steps.

    Parameters
    ----------
    pairs : DataFrame
        As `loss_differences` returns them.
    spread : DataFrame
        As `seed_spread` returns it.
    margin : float
        Drawn beside, in nats.
    look : mapping of str to Look
        Of the geometries.

    Returns
    -------
    Figure or None
        None where all losses are equal to the last bit, or none is paired.
    """
    differ = pairs["difference"].abs().gt(0) & np.isfinite(pairs["difference"])
    families = sorted(pairs.loc[differ, "reference"].unique())[:MOST_PANELS]
    if not families:
        return None
    drawn = pairs[differ & pairs["reference"].isin(families)]
    columns = min(len(families), 3)
    rows = -(-len(families) // columns)
    width = COLUMN_IN if columns == 1 else PAGE_IN
    figure = Figure(figsize=(width, 0.9 + 2.0 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    labels = geometry_label(cells.table)
    used: dict[str, None] = {}
    for axes, family in zip(panels.flat, families, strict=False):
        used |= dict.fromkeys(_panel(axes, drawn[drawn["reference"] == family], labels, look))
        seeds = spread[(spread["reference"] == family) & spread["sd"].gt(0)]
        axes.plot(seeds["optimizer_step"], seeds["sd"], color=_GREY, linewidth=0.8)
        axes.axhline(margin, color="black", linestyle="--", linewidth=0.8)
        axes.set_title(_names(cells, [family], geometry=False)[0])
        axes.set_xlabel("optimizer step")
    for axes in panels.flat[len(families) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel(loss_axis("rms Δ training loss", cells.runs))
    handles = [
        *(
            Line2D([], [], color=look[name].colour, linestyle=look[name].dash, label=name)
            for name in used
        ),
        Line2D([], [], color=_GREY, linewidth=0.8, label="sd between seeds"),
        Line2D([], [], color="black", linestyle="--", linewidth=0.8, label="margin"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3 if columns == 1 else 6)
    return figure


def _panel(
    axes: Axes, pairs: pd.DataFrame, labels: pd.Series[str], look: Mapping[str, Look]
) -> list[str]:
    axes.set_yscale("log")
    shown = []
    for cell, rows in pairs.groupby("cell"):
        square = (rows["difference"] ** 2).groupby(rows["optimizer_step"]).mean()
        style = look[labels[cell]]
        axes.plot(
            square.index,
            np.sqrt(square),
            color=style.colour,
            linestyle=style.dash,
            linewidth=min(style.width, 1.2),
        )
        shown.append(labels[cell])
    return shown


def _names(
    cells: Cells, chosen: Sequence[int] | pd.Series[int], *, geometry: bool = True
) -> list[str]:
    """Name cells by their geometry and the settings in which the chosen ones differ."""
    table = cells.table.loc[list(chosen)]
    varying = [name for name in cells.contexts if cells.table[name].nunique() > 1]
    texts = geometry_label(table) if geometry else "batch " + table["global_batch_size"].astype(str)
    for name in varying:
        value = setting_texts(table, name)
        said = value if name == "precision" else setting_label(name) + " " + value
        texts = texts + ", " + said
    return texts.tolist()
