"""A picture, declared once: which columns of which tables it shows, on what scales.

Page and paper draw the same declaration (`vega.py`). Axes name columns, and every table of marks
has the columns that it is shown by: `<column>_low` and `<column>_high` are the ends of an interval,
`<column>_start` is where a bar begins, `series` names the entry of the legend. Rows lead to their
runs by `run` (a position), by `cell`, or as `RunIndex.of_row` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd

__all__ = ["Axis", "Chart", "Choice", "Look", "Marks"]


@dataclass(frozen=True)
class Look:
    """How one entry of the legend is drawn."""

    colour: str
    dark: str = ""
    """Colour on a dark page; empty: the same."""
    symbol: str = "circle"
    """Of its points, and in the legend; `stroke` is a short line."""
    dash: tuple[float, ...] = ()
    width: float = 1.2
    hollow: bool = False


@dataclass(frozen=True)
class Axis:
    """What an axis shows."""

    columns: Mapping[str, str]
    """Titles by column; of several the reader of the page chooses, and the paper has the first."""
    label: str = ""
    """What that choice is called."""
    kind: Literal["linear", "log", "names", "either"] = "linear"
    """`either`: the reader chooses between linear and logarithmic."""
    ticks: Sequence[float] = ()
    """Places that are named; empty: round ones."""
    from_zero: bool = False
    falls: bool = False
    """Whether it begins with the largest."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Part of the axis that shows, by column."""


@dataclass(frozen=True)
class Marks:
    """A mark a row, or a line a series."""

    kind: Literal["point", "line", "band", "interval", "bar", "field", "text", "rule", "span"]
    """A `rule` goes through the picture at a place on one axis, a `span` between two on x."""
    table: pd.DataFrame
    name: str = ""
    """Entry of the legend, where the table has no column `series`."""
    text: str = ""
    """Column of what is written, or of what is said of a row that is pointed at."""
    line: str = ""
    """Column that parts lines of one series."""
    size: float = 14
    """Of points, in square points."""
    placed: Literal["", "x", "y"] = ""
    """Axis on which marks only find a place, which is no number that could be told of them."""
    dodge: bool = False
    """Whether bars of several series stand side by side."""


@dataclass(frozen=True)
class Choice:
    """A list of which a reader of the page picks one; rows with another value do not show."""

    column: str
    """Holds values, or lists of those under which the row shows."""
    label: str
    options: Mapping[str, str]
    """Labels by value; the first is chosen when the page opens."""


@dataclass(frozen=True)
class Chart:
    """A picture and what it means."""

    name: str
    """`figures/<name>.png`, `paper/figures/<name>.pdf`, and its place on the page."""
    title: str
    caption: str
    x: Axis
    y: Axis
    marks: Sequence[Marks]
    looks: Mapping[str, Look] = field(default_factory=dict)
    """Of the entries of the legend, in its order."""
    z: Axis | None = None
    """What the colour of fields shows."""
    choices: Sequence[Choice] = ()
    panels: str = ""
    """`x`, `y`, `z` or the column of a choice: the paper shows its options side by side."""
    page_only: Sequence[str] = ()
    """Options of `panels` that a paper has no room for."""
    aside: str = ""
    """What the caption says further on a page, where more is drawn than in a paper."""
    tables: Sequence[str] = ()
    """Files of the same numbers."""
