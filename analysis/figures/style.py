"""How figures look: a paper column wide, one colour a geometry in all of them."""

from __future__ import annotations

import atexit
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

import matplotlib as mpl
from fontTools.ttLib import TTFont
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from batchscape.analysis.cells import Cells, geometry_label
from batchscape.analysis.numbers import significant
from batchscape.outgoing import outgoing

__all__ = [
    "COLUMN_IN",
    "PAGE_IN",
    "PALETTE",
    "Look",
    "colour_of",
    "looks",
    "name_group",
    "paper_style",
    "plain_ticks",
    "save",
    "tint",
]

COLUMN_IN = 3.5
"""Width of a column of a two-column paper, in inches."""
PAGE_IN = 7.0
"""Width of its page, in inches."""
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours for every kind of colour vision, without their yellow, which is too pale
for lines (https://jfly.uni-koeln.de/color/)."""

_DEJAVU = "DejaVu Sans"
_DPI = 200
_LETTERS_AN_INCH = 15
"""Of a title, in the size of `name_group`."""
_DASHES = ("-", (0, (5, 1.5)), (0, (2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_MARKERS = "osD^vPX<>h"
_STYLE: Any = {
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8,
    "figure.dpi": _DPI,
    "font.size": 8,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}


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
    batches = dict(zip(geometry_label(table), table["global_batch_size"], strict=True))
    members = {batch: [g for g in batches if batches[g] == batch] for batch in batches.values()}
    return {
        geometry: Look(
            colour=colour_of(index, len(batches)),
            marker=_MARKERS[index % len(_MARKERS)],
            **_line(members[batch].index(geometry), len(members[batch])),
        )
        for index, (geometry, batch) in enumerate(batches.items())
    }


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
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    subs: tuple[float, ...] = (1, 2, 5) if decades < 2.5 else (1, 3) if decades < 4 else (1,)
    subs = (1, 1.2, 1.5, 2, 3, 5, 7) if decades < 0.9 else subs
    axis.set_major_locator(LogLocator(subs=subs))
    if sum(low <= place <= high for place in axis.get_majorticklocs()) < 2:
        axis.set_major_locator(FixedLocator(MaxNLocator(4).tick_values(low, high)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axis.set_minor_locator(NullLocator())


def _plain(value: float) -> str:
    return f"{value:g}" if 1e-4 <= value < 1e6 else significant(value, 1)


@contextmanager
def paper_style() -> Iterator[None]:
    """Draw with the settings of this project and nothing of the caller's."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        mpl.rcParams["font.family"] = [_font(), _DEJAVU]
        yield


@cache
def _font() -> str:
    """Write DejaVu Sans without its tables of ligatures and scripts, which figures have not.

    Every PDF holds the letters that it shows; to choose them took most of its time with the tables.
    """
    folder = TemporaryDirectory(prefix="batchscape-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "figures.ttf"
    font = TTFont(findfont(_DEJAVU))
    for table in ("GDEF", "GPOS", "GSUB"):
        del font[table]
    for name in list(font["name"].names):
        where = name.nameID, name.platformID, name.platEncID, name.langID
        font["name"].setName(name.toUnicode().replace("DejaVu", "Figures"), *where)
    font.save(path)
    fontManager.addfont(path)
    return "Figures Sans"


def tint(colour: str, strength: float) -> tuple[float, float, float]:
    """Mix a colour with white; strength 1 leaves it as it is."""
    red, green, blue = mpl.colors.to_rgb(colour)
    return (
        1 - strength * (1 - red),
        1 - strength * (1 - green),
        1 - strength * (1 - blue),
    )


def save(figure: Figure, png: Path, pdf: Path) -> None:
    """Write a figure to look at and one for a paper, whose fonts are embedded.

    Parameters
    ----------
    png, pdf : Path
        The files. The PDF holds no date, so that equal figures are equal.
    """
    for text in figure.findobj(Text):
        text.set_text(outgoing(text.get_text()))
    # Saving would lay the figure out for each file, and draw it once more every time.
    if (layout := figure.get_layout_engine()) is not None:
        figure.set_dpi(_DPI)
        layout.execute(figure)
        figure.set_layout_engine(None)
    figure.savefig(png, dpi=_DPI)
    figure.savefig(pdf, metadata={"CreationDate": None})


def colour_of(index: int, total: int) -> str:
    """Choose the colour of one of several things that a figure tells apart."""
    if total <= len(PALETTE):
        return PALETTE[index]
    # Many geometries are ordered, and an ordered map that is even in lightness serves better.
    return mpl.colors.to_hex(mpl.colormaps["viridis"](0.92 * index / (total - 1)))


def _line(index: int, total: int) -> dict[str, Any]:
    """Choose dash and width of one of the decompositions of a global batch."""
    if total == 1:
        return {"dash": "-", "width": 1.2}
    return {"dash": _DASHES[index % len(_DASHES)], "width": max(2.6 - 0.5 * index, 1.0)}
