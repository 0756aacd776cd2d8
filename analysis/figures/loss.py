"""Figures of loss: against optimizer steps, samples and training time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import CARETUPBASE
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from batchscape.analysis.cells import Cells, geometry_label
from batchscape.analysis.figures.curves import LossCurves
from batchscape.analysis.figures.panels import context_title, lay_out
from batchscape.analysis.figures.style import COLUMN_IN, Look, loss_axis

__all__ = ["MAX_MARKERS", "MAX_PANELS", "draw_loss"]

MAX_PANELS = 6
"""Panels of a figure, which fit on a page; further settings are left to the tables."""

MAX_MARKERS = 12
"""Evaluations that are marked on a curve: more would hide it."""

_AXES = {
    "optimizer_step": "optimizer steps",
    "samples": "samples",
    "train_time_s": "training time (s)",
}
_GREY = "#666666"
_BEYOND: dict[str, Any] = {"linestyle": "none", "marker": CARETUPBASE, "clip_on": False}
_MOST_FALLS, _SHOWN_FALLS = 3.0, 1.5
"""A panel that would be higher than three times the fall of the loss from its start is cut at half
a fall above that start."""


def draw_loss(
    cells: Cells,
    curves: LossCurves,
    against: Literal["optimizer_step", "samples", "train_time_s"],
    look: Mapping[str, Look],
) -> Figure | None:
    """Draw training loss (mean, minimum to maximum over runs) and held-out loss (markers).

    Cells whose settings differ get panels of their own. Against optimizer steps, a panel beneath
    shows how far the decompositions of one global batch are apart, beside the spread of seeds.

    Parameters
    ----------
    against : str
        Column of progress.
    look : mapping
        As `style.looks` returns it.

    Returns
    -------
    Figure or None
        None where there is nothing to draw.
    """
    context = cells.context_of()
    drawn = pd.concat([curves.steps["cell"], curves.diverged["cell"]]).unique().astype(int)
    contexts = sorted(context.loc[drawn].unique())[:MAX_PANELS]
    if not contexts:
        return None
    labels = geometry_label(cells.table)
    deep = against == "optimizer_step" and len(curves.differences) > 0
    apart = context.reindex(curves.differences["cell"]).unique()
    whole = [number in apart for number in contexts]
    figure, panels = lay_out(len(contexts), [2.2, 1.5] if deep else [2.2], whole)
    # Losses of different tasks have nothing to do with each other.
    alike = not any(name.startswith(("data.", "model.")) for name in cells.contexts)
    beyond = False
    for number, (top, *below) in zip(contexts, panels, strict=True):
        members = [cell for cell in context.index[context == number] if cell in drawn]
        drawing = {cell: look[labels[cell]] for cell in members}
        limits = _limits(curves, drawn if alike else members)
        beyond |= _draw_curves(top, curves, against, drawing, limits)
        place = top.get_subplotspec()
        if alike and limits and place is not None and not place.is_first_col():
            top.tick_params(labelleft=False)  # those of the first column hold for all
        if len(contexts) > 1:
            top.set_title(context_title(cells, members[0]))
        last = top
        for bottom in below if curves.differences["cell"].isin(members).any() else ():
            bottom.set_visible(True)
            bottom.sharex(top)
            top.tick_params(labelbottom=False)
            _draw_differences(bottom, curves, drawing, labels)
            last = bottom
        last.set_xlabel(_AXES[against])
    panels[0][0].set_ylabel(loss_axis("loss", cells.runs))
    names = [name for name in look if name in set(labels[drawn])]
    _draw_legend(figure, names, look, curves, deep=deep, beyond=beyond)
    return figure


def _limits(curves: LossCurves, members: Sequence[int]) -> tuple[float, float] | None:
    """Range of completed runs, cut where a few losses would press the others into one line."""
    lines = curves.steps[curves.steps["cell"].isin(members)]
    held_out = curves.evals[curves.evals["cell"].isin(members)]
    if lines.empty:
        lost = curves.diverged[curves.diverged["cell"].isin(members)]
        lines = lost.assign(mean=lost["loss"], low=lost["loss"], high=lost["loss"])
    low = min(lines["low"].min(), held_out["mean"].min() if len(held_out) else np.inf)
    high = max(lines["high"].max(), held_out["mean"].max() if len(held_out) else -np.inf)
    firsts = [table.groupby("cell")["mean"].first() for table in (lines, held_out)]
    fall = max(own.median() for own in firsts if len(own)) - low
    if 0 < _MOST_FALLS * fall < high - low:
        high = low + _SHOWN_FALLS * fall
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return (low - margin, high + margin) if np.isfinite([low, high]).all() else None


def _draw_curves(
    axes: Axes,
    curves: LossCurves,
    against: str,
    members: Mapping[int, Look],
    limits: tuple[float, float] | None,
) -> bool:
    """Draw one panel, and tell whether a completed curve leaves it."""
    lines, marks, lost = (
        _by_cell(table, members) for table in (curves.steps, curves.evals, curves.diverged)
    )
    for cell, look in members.items():
        line, held_out = lines[cell], marks[cell]
        axes.fill_between(
            line[against], line["low"], line["high"], color=look.colour, alpha=0.15, linewidth=0
        )
        axes.plot(
            line[against],
            line["mean"],
            color=look.colour,
            linestyle=look.dash,
            linewidth=look.width,
            marker="." if len(line) == 1 else None,
        )
        axes.plot(
            held_out[against],
            held_out["mean"],
            linestyle="none",
            marker=look.marker,
            markevery=_marked(len(held_out)),
            markersize=3 + look.width,
            markerfacecolor="none",
            markeredgecolor=look.colour,
        )
    if limits:
        axes.set_ylim(limits)
    for cell, look in members.items():
        _draw_diverged(axes, lost[cell], against, look)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=against != "train_time_s"))
    left = [
        _mark_beyond(axes, tables[cell], against, look)
        for tables in (lines, marks)
        for cell, look in members.items()
    ]
    return any(left)


def _marked(points: int) -> list[int]:
    """Choose the points of a curve that are marked, the last among them."""
    return list(range(points))[:: -max(math.ceil(points / MAX_MARKERS), 1)]


def _by_cell(table: pd.DataFrame, cells: Iterable[int]) -> dict[int, pd.DataFrame]:
    """Part a table; looking for one cell after the other would go through all of it each time."""
    parts = {int(str(cell)): rows for cell, rows in table.groupby("cell")}
    return {cell: parts.get(cell, table.iloc[:0]) for cell in cells}


def _mark_beyond(axes: Axes, curve: pd.DataFrame, against: str, look: Look) -> bool:
    """Put a caret on the upper edge wherever a curve leaves the panel."""
    top = axes.get_ylim()[1]
    beyond = curve["mean"].gt(top)
    leaves = curve.loc[beyond & ~beyond.shift(fill_value=False), against]
    if leaves.empty:
        return False
    axes.plot(leaves, [top] * len(leaves), color=look.colour, **_BEYOND)
    return True


def _draw_diverged(axes: Axes, diverged: pd.DataFrame, against: str, look: Look) -> None:
    """Draw each run until it leaves the panel, with a cross at its end."""
    top = axes.get_ylim()[1]
    for _, rows in diverged.groupby("run"):
        line = rows[rows["loss"].gt(top).cumsum() <= 1]
        loss = line["loss"].clip(upper=top)
        axes.plot(line[against], loss, color=look.colour, linewidth=0.7)
        axes.plot(
            line[against].iloc[-1:], loss.iloc[-1:], marker="x", color=look.colour, clip_on=False
        )


def _draw_differences(
    axes: Axes, curves: LossCurves, members: Mapping[int, Look], labels: pd.Series[str]
) -> None:
    drawn = curves.differences[curves.differences["cell"].isin(list(members))]
    for cell, look in members.items():
        line = drawn[(drawn["cell"] == cell) & drawn["largest"].gt(0)]
        if line.empty:
            continue
        axes.plot(
            line["optimizer_step"],
            line["largest"],
            color=look.colour,
            linestyle=look.dash,
            linewidth=1.2,
            marker="." if len(line) == 1 else None,
        )
    references = drawn["reference"].unique()
    for reference in references:
        line = curves.spread[curves.spread["cell"] == reference]
        axes.plot(line["optimizer_step"], line["sd"], color=_GREY, linewidth=0.8, linestyle=":")
    if not drawn["largest"].gt(0).any():
        axes.text(0.5, 0.3, "equal to the last bit", transform=axes.transAxes, ha="center")
    if drawn["largest"].gt(0).any() or len(curves.spread):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_yticks([])
    one = f" to {labels[references[0]]}" if len(references) == 1 else ""
    axes.set_ylabel(f"|Δ loss|{one}")


def _draw_legend(
    figure: Figure,
    labels: list[str],
    look: Mapping[str, Look],
    curves: LossCurves,
    *,
    deep: bool,
    beyond: bool,
) -> None:
    handles = [
        Line2D(
            [],
            [],
            color=look[label].colour,
            linestyle=look[label].dash,
            linewidth=look[label].width,
            marker=look[label].marker if len(curves.evals) else None,
            markerfacecolor="none",
            label=label,
        )
        for label in labels
    ]
    if len(curves.evals):
        held_out: dict[str, Any] = {"linestyle": "none", "marker": "o", "markerfacecolor": "none"}
        handles.append(Line2D([], [], color=_GREY, label="held-out loss", **held_out))
    if deep and len(curves.spread):
        handles.append(Line2D([], [], color=_GREY, linestyle=":", label="sd between seeds"))
    if len(curves.diverged):
        handles.append(Line2D([], [], color=_GREY, marker="x", linewidth=0.7, label="diverged"))
    if beyond:
        handles.append(Line2D([], [], color=_GREY, label="beyond the panel", **_BEYOND))
    narrow = figure.get_figwidth() <= COLUMN_IN
    figure.legend(
        handles=handles, loc="outside lower center", ncols=3 if narrow else 6, handlelength=3.0
    )
