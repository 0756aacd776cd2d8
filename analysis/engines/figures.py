"""Figures of engines: their losses on top of each other, their memory and time side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import fill, shorten

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from batchscape.analysis.cells import Cells, geometry_label, setting_label, setting_texts
from batchscape.analysis.engines.losses import EngineLosses
from batchscape.analysis.engines.matching import counterparts, shared_settings
from batchscape.analysis.figures.panels import lay_out
from batchscape.analysis.figures.style import COLUMN_IN, PAGE_IN, colour_of
from batchscape.analysis.numbers import memory_scale, time_scale

__all__ = ["MOST_GEOMETRIES", "MOST_PANELS", "draw_engine_costs", "draw_engine_losses"]

MOST_PANELS = 6
"""Global batches and settings in the figure of losses."""
MOST_GEOMETRIES = 12
"""Geometries in the figure of costs."""

_GREY = "#666666"
_BARS = 0.8
"""Share of a row that its bars take."""
_MOST_LETTERS = 80
"""Of a reason beside the axis."""
_DASHES = ("-", (0, (5, 1.5)), (0, (2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))


def draw_engine_losses(
    cells: Cells, curves: pd.DataFrame, losses: EngineLosses, engines: Sequence[str]
) -> Figure | None:
    """Draw the curves of all engines on top of each other, and their differences beneath.

    Parameters
    ----------
    curves : DataFrame
        Mean training loss of each cell, as `mean_curves` returns it.
    engines : sequence of str
        In the order of the legend; the first is the one that others are held against.

    Returns
    -------
    Figure or None
        None where no two engines trained the same.
    """
    found = counterparts(cells)
    groups = list(dict.fromkeys(losses.pairs["group"]))[:MOST_PANELS]
    if not groups:
        return None
    colours = _colours(engines)
    # Earlier engines are wider, so that they show beneath the later ones.
    widths = np.linspace(3.4, 0.8, len(engines))
    figure, panels = lay_out(len(groups), [2.0, 1.5])
    for group, (top, bottom) in zip(groups, panels, strict=True):
        own = found[found["group"] == group]
        for width, engine in zip(widths, engines, strict=True):
            for number, cell in enumerate(own.index[own["engine"] == engine]):
                line = curves[curves["cell"] == cell]
                drawn = top.plot(line["optimizer_step"], line["mean"], color=colours[engine])
                drawn[0].set(linewidth=width, linestyle=_DASHES[number % len(_DASHES)])
        bottom.set_visible(True)
        bottom.sharex(top)
        top.tick_params(labelbottom=False)
        _draw_differences(bottom, losses, group, colours)
        top.set_title(_title(cells, int(own.index[0])))
        bottom.set_xlabel("optimizer steps")
    panels[0][0].set_ylabel("loss")
    panels[0][1].set_ylabel(f"largest |Δ loss|\nto {engines[0]}")
    handles = [Line2D([], [], color=colours[name], label=name) for name in engines]
    if len(losses.spread):
        handles.append(Line2D([], [], color=_GREY, linestyle=":", label="sd between seeds"))
    figure.legend(handles=handles, loc="outside lower center", ncols=_columns(figure))
    return figure


def draw_engine_costs(table: pd.DataFrame, engines: Sequence[str]) -> Figure | None:
    """Draw memory and step time side by side, a bar an engine, a row a geometry.

    Parameters
    ----------
    table : DataFrame
        As `engine_costs` returns it.
    engines : sequence of str
        In the order of the legend.

    Returns
    -------
    Figure or None
        None where neither memory nor time was measured.
    """
    sizes = table[["peak_allocated_gib_mean", "step_time_s_mean"]]
    if not sizes.notna().any(axis=None):
        return None
    labels = _row_names(table)
    rows = list(dict.fromkeys(labels))[:MOST_GEOMETRIES]
    height = 0.9 + len(rows) * (0.12 * len(engines) + 0.08)
    figure = Figure(figsize=(PAGE_IN, height), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    memory, time = memory_scale(sizes.iloc[:, 0]), time_scale(sizes.iloc[:, 1])
    colours = _colours(engines)
    placed = table.assign(row=labels)
    for axes, name, scale in (
        (left, "peak_allocated_gib", memory),
        (right, "step_time_s", time),
    ):
        sized = placed.assign(
            mean=placed[f"{name}_mean"] * scale.factor, half=placed[f"{name}_ci95"] * scale.factor
        )
        _bars(axes, sized.dropna(subset=["mean"]), rows, colours)
        _say_why_missing(axes, sized, rows, engines, name)
    left.set_xlabel(f"peak allocated memory of a device ({memory.unit})")
    right.set_xlabel(f"median optimizer step ({time.unit})")
    left.set_yticks(range(len(rows)), [fill(row, 30) for row in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)
    handles = [Patch(color=colours[name], label=name) for name in engines]
    figure.legend(handles=handles, loc="outside lower center", ncols=_columns(figure))
    return figure


def _draw_differences(
    axes: Axes, losses: EngineLosses, group: int, colours: Mapping[str, str]
) -> None:
    own = losses.by_step[losses.by_step["group"] == group]
    for engine, colour in colours.items():
        line = own[(own["engine"] == engine) & own["largest"].gt(0)]
        mark = "." if len(line) == 1 else None
        axes.plot(line["optimizer_step"], line["largest"], color=colour, linewidth=1, marker=mark)
    spread = losses.spread[losses.spread["group"] == group]
    axes.plot(spread["optimizer_step"], spread["sd"], color=_GREY, linewidth=0.8, linestyle=":")
    if own["largest"].gt(0).any() or len(spread):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.3, "equal to the last bit", transform=axes.transAxes, ha="center")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def _bars(axes: Axes, table: pd.DataFrame, rows: Sequence[str], colours: Mapping[str, str]) -> None:
    height = _BARS / len(colours)
    for place, (engine, colour) in enumerate(colours.items()):
        own = table[(table["engine"] == engine) & table["row"].isin(rows)]
        offset = (place - (len(colours) - 1) / 2) * height
        y = np.array([rows.index(row) + offset for row in own["row"]])
        error = own["half"].fillna(0)
        axes.barh(
            y,
            own["mean"],
            height,
            xerr=error if error.gt(0).any() else None,
            color=colour,
            error_kw={"elinewidth": 0.7},
        )
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(visible=False, axis="y")
    axes.set_axisbelow(True)


def _say_why_missing(
    axes: Axes, table: pd.DataFrame, rows: Sequence[str], engines: Sequence[str], name: str
) -> None:
    """Write the reason where a bar would be."""
    notes = table.reindex(columns=[f"{name}_note"]).iloc[:, 0]
    known = {
        (row, engine): (mean, note)
        for row, engine, mean, note in zip(
            table["row"], table["engine"], table["mean"], notes, strict=True
        )
    }
    for index, row in enumerate(rows):
        for place, engine in enumerate(engines):
            mean, note = known.get((row, engine), (math.nan, "no run completed"))
            if math.isnan(mean):
                why = note if isinstance(note, str) else "not measured"
                axes.annotate(
                    shorten(f"n/a: {why}", _MOST_LETTERS, placeholder=" …"),
                    (0, index + (place - (len(engines) - 1) / 2) * _BARS / len(engines)),
                    xytext=(2, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=5,
                    color=_GREY,
                )


def _row_names(table: pd.DataFrame) -> list[str]:
    """Name each row of bars by its geometry and the settings that vary beside the engine."""
    names = geometry_label(table)
    columns = list(table.columns)
    # The settings stand between the geometry and the engine.
    between = columns[columns.index("global_batch_size") + 1 : columns.index("engine")]
    varying = [name for name in between if table[name].nunique(dropna=False) > 1]
    # A learning rate and what a rule made of it are one text under one label.
    for label, texts in {setting_label(n): setting_texts(table, n) for n in varying}.items():
        names = names + ", " + label + " " + texts
    return names.tolist()


def _title(cells: Cells, cell: int) -> str:
    row = cells.table.loc[[cell]]
    parts = [f"global batch {row['global_batch_size'].iloc[0]}"]
    shown = [name for name in shared_settings(cells) if name in cells.contexts]
    parts += [f"{setting_label(name)} {setting_texts(row, name).iloc[0]}" for name in shown]
    return fill(", ".join(parts), 34)


def _colours(engines: Sequence[str]) -> dict[str, str]:
    return {name: colour_of(index, len(engines)) for index, name in enumerate(engines)}


def _columns(figure: Figure) -> int:
    return 3 if figure.get_figwidth() <= COLUMN_IN else 6
