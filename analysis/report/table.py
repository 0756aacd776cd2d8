"""A table as numbers: a frame, and columns that say how it is shown. Writers make texts of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.numbers import MISSING, Scale, memory_scale, significant, time_scale
from batchscape.analysis.numbers import with_spread as spread_text
from batchscape.outgoing import outgoing

__all__ = ["MAX_ROWS", "Column", "Table", "Texts"]

MAX_ROWS = 40
"""Rows of a long table that page and Markdown show: about what one printed page holds."""

_SCALES = {"GiB": memory_scale, "s": time_scale}
"""Units in which numbers are recorded, and what chooses the unit in which they are shown."""
_NUMBERS = ("floating", "integer", "mixed-integer-float")


@dataclass(frozen=True, eq=False)
class Column:
    """What one column shows of the frame."""

    name: str
    """Column of the frame with its values, which the page sorts by."""
    header: str = ""
    """Empty: the name, with blanks."""
    unit: str = ""
    """Stands in the header; `GiB` and `s` become MiB and ms where all values are small."""
    format: int | str = 4
    """Significant digits, or a format such as `.0f`."""
    low: str = ""
    """Column with the lower ends of intervals, as `high` has the upper ones."""
    high: str = ""
    spread: str = ""
    """Column with half-widths, in place of ends."""
    n: str = ""
    """Column with the units behind each value, which are said below `FEWEST`, where no interval is
    shown; with `usual`, where they are others."""
    usual: str = ""
    """Column with the n that goes without saying."""
    units: str = ""
    """Column with the unit of each value, where they differ."""
    words: Mapping[Any, str] | None = None
    """What values are called."""
    texts: Sequence[str] | pd.Series[str] | None = None
    """Texts, one a row of the frame, where no format makes them."""
    missing: str = MISSING
    """Stands where there is no value."""
    is_left: bool = False
    """Whether it names the row: set flush left, and kept where it says nothing."""


@dataclass(frozen=True)
class Table:
    """A table in full, and what of it is shown."""

    name: str
    """File name without its ending: `tables/<name>.csv`, `paper/tables/<name>.tex`."""
    title: str
    frame: pd.DataFrame
    """Everything; its rows name the runs behind them."""
    columns: Sequence[Column]
    """What is shown: those that name the row first."""
    rows: Sequence[int] | None = None
    """Positions of the rows that are shown; None: all of them."""
    footnotes: Sequence[Sequence[object] | pd.Series[Any]] = ()
    """Texts, one a row of the frame or missing, in several such columns."""
    notes: Sequence[str] = ()
    """Lines under the table, definitions among them."""
    bold: Collection[tuple[int, str]] = ()
    """What is set in bold, by position of the row and name of the column; a note says why."""
    lead: Sequence[int] = ()
    """Positions of the rows that are shown first where there is no room for all."""
    hidden: Collection[str] = ()
    """Columns of the frame that are in no file."""

    @property
    def csv(self) -> pd.DataFrame:
        """What the file has."""
        return self.frame.drop(columns=list(self.hidden))

    @property
    def positions(self) -> list[int]:
        """Positions of the rows that are shown."""
        return list(range(len(self.frame)) if self.rows is None else self.rows)

    @property
    def filled(self) -> dict[Column, tuple[str, list[str]]]:
        """Header and texts of the columns that say anything of a row that is shown."""
        written = {column: _written(column, self.frame, self.positions) for column in self.columns}
        return {column: of for column, of in written.items() if _says(column, of[1])}

    def texts(self) -> Texts:
        """Write the rows that are shown."""
        rows, filled = self.positions, self.filled
        columns, kept = list(filled), list(filled.values())
        footnotes = [list(texts) for texts in self.footnotes]
        said = [[text[row] for text in footnotes if isinstance(text[row], str)] for row in rows]
        texts = dict.fromkeys(text for own in said for text in own)
        letters = {text: _letter(i) for i, text in enumerate(texts)}
        bold = {(rows.index(row), name) for row, name in self.bold if row in rows}
        return Texts(
            title=outgoing(self.title),
            headers=[outgoing(header) for header, _ in kept],
            rows=[
                [outgoing(text) for text in row]
                for row in zip(*(texts for _, texts in kept), strict=True)
            ],
            keys=[_keys(column, self.frame, rows) for column in columns],
            n_left=sum(column.is_left for column in columns),
            marks=[
                [letters[text] for text in sorted(own, key=letters.__getitem__)] for own in said
            ],
            footnotes={letter: outgoing(str(text)) for text, letter in letters.items()},
            notes=[outgoing(note) for note in self.notes],
            bold={
                (row, i) for i, of in enumerate(columns) for row, name in bold if name == of.name
            },
        )

    def shortened(self, max_rows: int = MAX_ROWS) -> Table:
        """Keep what a page can show of a long table, and say so under it.

        Those of `lead` are kept first, then those with a bold figure, then the first ones.
        """
        rows = self.positions
        if len(rows) <= max_rows:
            return self
        place = {row: index for index, row in enumerate(self.lead)}
        marked = {row for row, _ in self.bold}
        first = sorted(rows, key=lambda row: (place.get(row, len(rows)), row not in marked))
        kept = first[:max_rows]
        which = "those with a bold figure, and the first of the others" if marked else "the first"
        if place:
            which = f"those at the best settings of the update, then {which}"
        note = f"{max_rows} of {len(rows)} rows are shown: {which}. The CSV file has all."
        return replace(self, rows=kept if place else sorted(kept), notes=[note, *self.notes])


@dataclass(frozen=True)
class Texts:
    """A table as texts, before any markup; as they may leave, whoever made them."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: Sequence[Sequence[float | None] | None]
    """Numbers that the rows are sorted by, a column each; None: by the texts, or at the end."""
    n_left: int
    marks: Sequence[Sequence[str]]
    """Letters of the footnotes of each row, set behind its last left column."""
    footnotes: Mapping[str, str]
    notes: Sequence[str]
    bold: Collection[tuple[int, int]]
    """By row and column."""


def _says(column: Column, texts: Sequence[str]) -> bool:
    """Tell whether a column says anything of a row."""
    return not set(texts) <= ({""} if column.is_left else {"", MISSING})


def _written(column: Column, frame: pd.DataFrame, rows: Sequence[int]) -> tuple[str, list[str]]:
    """Write the header and the texts of a column."""
    header = column.header or column.name.replace("_", " ")
    if column.texts is not None:
        texts = list(column.texts)
        return header, [str(texts[row]) for row in rows]
    scale = _scale(column, frame)
    header = f"{header} ({scale.unit})" if scale.unit else header
    shown = list(_numbers(column, frame.iloc[list(rows)], scale))
    counts = [n for text, n in shown if not text.startswith((MISSING, column.missing))]
    if len(counts) > 1 and len(set(counts)) == 1 and counts[0]:
        return f"{header}, {counts[0]}", [text for text, _ in shown]
    return header, [f"{text} ({n})" if n else text for text, n in shown]


def _scale(column: Column, frame: pd.DataFrame) -> Scale:
    if column.unit in _SCALES:
        return _SCALES[column.unit](_floats(frame, column.name))
    return Scale(column.unit, 1.0)


def _numbers(column: Column, rows: pd.DataFrame, scale: Scale) -> Iterator[tuple[str, str]]:
    """Yield each value as a text, with what is to be said of its n."""
    kind = pd.api.types.infer_dtype(rows[column.name], skipna=True)
    is_number = kind in _NUMBERS and column.words is None
    if not is_number or (kind == "integer" and column.format == 4):
        words = column.words or {}
        for value in rows[column.name]:
            yield column.missing if pd.isna(value) else words.get(value, str(value)), ""
        return
    parts = (column.name, column.low, column.high, column.spread, column.n, column.usual)
    units = rows[column.units] if column.units else [""] * len(rows)
    numbers = zip(units, *(_floats(rows, name) for name in parts), strict=True)
    for unit, value, low, high, spread, n, usual in numbers:
        own = _SCALES[unit]([value]) if unit in _SCALES else Scale(str(unit or ""), scale.factor)
        few = n < FEWEST and not np.isnan(value)
        ends = (np.nan, np.nan) if few else (low * own.factor, high * own.factor)
        text = _with_ends(column, value * own.factor, ends, spread * own.factor)
        text = f"{text} {own.unit}" if own.unit and not np.isnan(value) else text
        says_n = 0 < n != usual and not np.isnan(value) if column.usual else few
        yield text, f"n = {n:.0f}" if says_n else ""


def _floats(frame: pd.DataFrame, name: str) -> list[float]:
    if not name:
        return [np.nan] * len(frame)
    return pd.to_numeric(frame[name]).astype(float).tolist()


def _with_ends(column: Column, value: float, ends: tuple[float, float], spread: float) -> str:
    if np.isnan(value):
        if not ends[0] > 0:
            return column.missing
        least = f"≥ {_number(ends[0], column.format)}"
        return least if column.missing == MISSING else f"{column.missing} ({least})"
    if column.spread and isinstance(column.format, int):
        return spread_text(value, spread, column.format)
    text = _number(value, column.format)
    if np.isnan(ends).any():
        return text
    return f"{text} [{', '.join(_number(end, column.format) for end in ends)}]"


def _number(value: float, how: int | str) -> str:
    return significant(value, how) if isinstance(how, int) else format(value, how)


def _keys(column: Column, frame: pd.DataFrame, rows: Sequence[int]) -> list[float | None] | None:
    """Return what a column sorts by; None where its values are no numbers."""
    if column.name not in frame:
        return None
    values = frame[column.name].iloc[list(rows)]
    numbers = pd.to_numeric(values, errors="coerce").astype(float)
    if numbers.isna().all() or (numbers.isna() & values.notna()).any():
        return None
    return [number if np.isfinite(number) else None for number in numbers]


def _letter(index: int) -> str:
    """Return a, b, ... z, aa, ab, ..."""
    quotient, remainder = divmod(index, 26)
    return (_letter(quotient - 1) if quotient else "") + chr(ord("a") + remainder)
