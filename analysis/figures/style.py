"""How figures look: a paper column wide, one colour a geometry in all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from batchscape.analysis.cells import Cells, geometry_label, launched_batches
from batchscape.analysis.numbers import significant

__all__ = [
    "COLUMN_IN",
    "PAGE_IN",
    "PALETTE",
    "Look",
    "colour_of",
    "looks",
    "loss_axis",
    "name_group",
    "plain_ticks",
    "shade_of",
    "shades_of",
    "tint",
]

COLUMN_IN = 3.5
"""Width of a column of a two-column paper, in inches."""
PAGE_IN = 7.0
"""Width of its page, in inches."""
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours for every kind of colour vision, without their yellow, which is too pale
for lines (https://jfly.uni-koeln.de/color/)."""

_LETTERS_AN_INCH = 15
"""Of a title, in the size of `name_group`."""
_PALER = 0.6
"""How much of the colour of its global batch the last of several cuts lacks."""
_DASHES = ("-", (0, (5, 1.5)), (0, (2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_MARKERS = "osD^vPX<>h"


@dataclass(frozen=True)
class Look:
    """How one geometry is drawn."""

    colour: str
    dash: Any
    marker: str
    width: float
    """Line width in points. Lines of one global batch lie on top of each other: earlier ones are
    wider, so that they show."""


def looks(cells: Cells) -> Mapping[str, Look]:
    """Give each geometry that ran its look, by label, in table order.

    Returns
    -------
    mapping of str to Look
        For geometries with at least one run that was not rejected.
    """
    launched = cells.runs.loc[cells.runs["status"].ne("rejected"), "cell"].unique()
    table = cells.table.loc[sorted(launched)]
    table = table.sort_values("global_batch_size", kind="stable")
    batches = dict(zip(geometry_label(table), table["global_batch_size"], strict=True))
    members = {batch: [g for g in batches if batches[g] == batch] for batch in batches.values()}
    shades = shades_of(launched_batches(cells.runs))
    look = {}
    for index, (geometry, batch) in enumerate(batches.items()):
        place, total = members[batch].index(geometry), len(members[batch])
        look[geometry] = Look(
            colour=mpl.colors.to_hex(tint(shades[batch], 1 - _PALER * place / max(total - 1, 1)))
            if len(members) > 1
            else colour_of(index, len(batches)),
            marker=_MARKERS[index % len(_MARKERS)],
            **_line(place, total),
        )
    return look


def name_group(figure: Figure, label: str) -> None:
    """Write above a figure of which group of runs it is, where there are several.

    Parameters
    ----------
    label : str
        Empty where there is one group, and nothing is written.
    """
    if label:
        letters = int(figure.get_figwidth() * _LETTERS_AN_INCH)
        figure.suptitle(fill(label, letters), fontsize=7, x=0.01, ha="left")


def plain_ticks(axis: Axis) -> None:
    """Write plain numbers, two at least, on a logarithmic axis whose limits are set.

    They stand at 1, 2 and 5 of each decade; of several decades some are left out, and within one
    others are added.
    """
    # A table of others may hold numbers beyond which there is no room for a margin.
    low = high = math.nan
    with np.errstate(over="ignore"), suppress(ValueError):
        low, high = axis.get_view_interval()
    if not 0 < low < high < math.inf:
        return
    decades = math.log10(high) - math.log10(low)
    subs: tuple[float, ...] = (1, 2, 5) if decades < 2.5 else (1, 3) if decades < 4 else (1,)
    subs = (1, 1.2, 1.5, 2, 3, 5, 7) if decades < 0.9 else subs
    axis.set_major_locator(LogLocator(subs=subs))
    places: Sequence[float] = list(axis.get_majorticklocs())
    if sum(low <= place <= high for place in places) < 2:
        places = MaxNLocator(4).tick_values(low, high)
    # No formatter of ours: the process that draws would have to import the analysis for it.
    axis.set_ticks([place for place in places if low <= place <= high])
    axis.set_ticklabels([_plain(place) for place in axis.get_majorticklocs()])
    axis.set_minor_locator(NullLocator())


def _plain(value: float) -> str:
    return f"{value:g}" if 1e-4 <= value < 1e6 else significant(value, 1)


def loss_axis(loss: str, runs: pd.DataFrame) -> str:
    """Name the axis of a loss with its unit, which one of a user's own task may not have."""
    has_other = runs.reindex(columns=["task"])["task"].eq("other").any()
    return loss if has_other else f"{loss} (nats)"


def tint(colour: str, strength: float) -> tuple[float, float, float]:
    """Mix a colour with white; strength 1 leaves it as it is."""
    red, green, blue = mpl.colors.to_rgb(colour)
    return (
        1 - strength * (1 - red),
        1 - strength * (1 - green),
        1 - strength * (1 - blue),
    )


def colour_of(index: int, total: int) -> str:
    """Choose the colour of one of several things that a figure tells apart."""
    # Many geometries are ordered, and an ordered map serves better.
    return PALETTE[index] if total <= len(PALETTE) else shade_of(index, total)


def shade_of(index: int, total: int) -> str:
    """Choose the colour of one of several global batches, in their order.

    The map is even in lightness, which every kind of colour vision tells apart.
    """
    return mpl.colors.to_hex(mpl.colormaps["viridis"](0.88 * index / max(total - 1, 1)))


def shades_of(batches: Iterable[float]) -> dict[float, str]:
    """Choose the colours of global batches, by what `launched_batches` returns."""
    sizes = sorted(set(batches))
    return {size: shade_of(index, len(sizes)) for index, size in enumerate(sizes)}


def _line(index: int, total: int) -> dict[str, Any]:
    """Choose dash and width of one of the decompositions of a global batch."""
    if total == 1:
        return {"dash": "-", "width": 1.2}
    return {"dash": _DASHES[index % len(_DASHES)], "width": max(2.6 - 0.5 * index, 1.0)}
