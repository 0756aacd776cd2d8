"""A chart, declared once: the columns of tables that it shows, and their scales.

Page and paper draw the same declaration (`vega.py`). Axes name columns, and every table of marks
has the columns that it is shown by: `<column>_low` and `<column>_high` are the ends of an interval,
`<column>_start` is where a bar begins, `series` names the entry of the legend. Rows lead to their
runs by `run` (a position), by `cell`, or as `RunIndex.of_row` finds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd

from batchscape.outgoing import outgoing

SCALE = "scale"
"""Column of the choice of a scale."""
_ENDS = ("", "_low", "_high", "_start", "_text")


@dataclass(frozen=True)
class Look:
    """How one entry of the legend is drawn."""

    colour: str
    dark: str = ""
    """Colour on a dark page; empty: the same."""
    symbol: str = "circle"
    """Symbol of points and of the entry in the legend; `stroke` is a short line."""
    dash: tuple[float, ...] = ()
    hollow: bool = False


@dataclass(frozen=True)
class Axis:
    """One axis: its columns and its scale."""

    columns: Mapping[str, str]
    """Titles by column. The reader of the page chooses one of several; the paper has the first."""
    label: str = ""
    """Label of that choice."""
    kind: Literal["linear", "log", "names", "either"] = "linear"
    """`either`: the reader chooses between linear and logarithmic."""
    ticks: Sequence[float] = ()
    """Values with ticks; empty: round ones."""
    from_zero: bool = False
    falls: bool = False
    """Whether the axis begins with the largest value."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Visible range, by column."""


@dataclass(frozen=True)
class Marks:
    """A mark a row, or a line a series."""

    kind: Literal["point", "line", "band", "interval", "bar", "field", "text", "rule", "span"]
    """A `rule` crosses the chart at a value of one axis; a `span` lies between two on x."""
    table: pd.DataFrame
    name: str = ""
    """Entry of the legend, where the table has no column `series`."""
    text: str = ""
    """Column of the text that is written, or that the tooltip of a row shows."""
    line: str = ""
    """Column that separates lines of one series."""
    size: float = 14
    """Of points, in square points."""
    placed: Literal["", "x", "y"] = ""
    """Axis that only places the marks, so that tooltips leave its values out."""
    dodge: bool = False
    """Whether bars of several series stand side by side."""


@dataclass(frozen=True)
class Choice:
    """A list of options for the reader of the page; rows of other options are hidden."""

    column: str
    """Column with the option of each row, or a list of its options."""
    label: str
    options: Mapping[str, str]
    """Labels by value; the first is chosen when the page opens."""


@dataclass(frozen=True)
class Chart:
    """A chart with its caption."""

    name: str
    """Name of `figures/<name>.png`, of `paper/figures/<name>.pdf` and of its place on the page."""
    title: str
    caption: str
    x: Axis
    y: Axis
    marks: Sequence[Marks]
    looks: Mapping[str, Look] = field(default_factory=dict)
    """Looks of the entries of the legend, in its order."""
    z: Axis | None = None
    """The colours of fields."""
    choices: Sequence[Choice] = ()
    panels: str = ""
    """`x`, `y`, `z` or the column of a choice: the paper shows its options side by side."""
    page_only: Sequence[str] = ()
    """Options of `panels` that a paper has no room for."""
    aside: str = ""
    """Further sentences of the caption on a page, which draws more than a paper."""
    tables: Sequence[str] = ()
    """Files of the same numbers."""
    legend: str = ""
    """Title of the legend, where its entries need one."""

    @cached_property
    def axes(self) -> dict[str, Axis]:
        """The axes by the channel that shows each."""
        axes = {"x": self.x, "y": self.y}
        return axes | ({"z": self.z} if self.z else {})

    @cached_property
    def all_choices(self) -> dict[str, Choice]:
        """All choices of a reader of the page: of rows, of the columns of axes, of a scale."""
        choices = list(self.choices)
        for name, axis in self.axes.items():
            if len(axis.columns) > 1:
                choices.append(Choice(name, axis.label, axis.columns))
        if "either" in {axis.kind for axis in self.axes.values()}:
            choices.append(Choice(SCALE, "Scale", {"linear": "linear", "log": "logarithmic"}))
        return {
            one.column: replace(
                one, options={outgoing(k): outgoing(v) for k, v in one.options.items()}
            )
            for one in choices
        }

    @cached_property
    def columns(self) -> list[dict[str, list[Any]]]:
        """For each of the marks the columns that it is drawn from, as JSON can hold them."""
        axes = self.axes.values()
        of_axes = [f"{name}{end}" for axis in axes for name in axis.columns for end in _ENDS]
        of_choices = [choice.column for choice in self.choices]
        return [
            {
                name: _values(marks.table[name])
                for name in dict.fromkeys([*of_axes, "series", marks.text, marks.line, *of_choices])
                if name in marks.table
            }
            for marks in self.marks
        ]


def _values(column: pd.Series[Any]) -> list[Any]:
    """Write a column as JSON can hold it: texts without secrets, missing values as null."""
    if pd.api.types.is_numeric_dtype(column):
        kind = int if pd.api.types.is_integer_dtype(column) else float
        numbers = column.to_numpy(dtype=float, na_value=np.nan).tolist()
        return [kind(number) if math.isfinite(number) else None for number in numbers]
    clean: dict[str, Any] = {}
    values = column.tolist()
    for value in values:
        if str(value) not in clean:
            clean[str(value)] = value if isinstance(value, list) else outgoing(str(value))
    return [None if value is None else clean[str(value)] for value in values]
