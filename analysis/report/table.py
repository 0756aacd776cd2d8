"""A table as numbers: a frame, and columns that say how it is shown. Writers make texts of it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.numbers import MISSING, Scale, memory_scale, significant, time_scale
from batchscape.analysis.numbers import with_spread as spread_text
from batchscape.outgoing import outgoing

MAX_ROWS = 40
"""Rows of a long table that page and Markdown show: about what one printed page holds."""

_SCALES = {"GiB": memory_scale, "s": time_scale}
"""Units in which numbers are recorded, and what chooses the unit in which they are shown."""
_NUMBERS = ("floating", "integer", "mixed-integer-float")


@dataclass(frozen=True, eq=False)
class Column:
    """What one column shows of the frame."""

    name: str
    """Column of the frame that has the values; the page sorts by them."""
    header: str = ""
    """Empty: the name, with blanks."""
    unit: str = ""
    """Unit in the header; `GiB` and `s` become MiB and ms where all values are small."""
    format: int | str = 4
    """Significant digits, or a format such as `.0f`."""
    low: str = ""
    """Column with the lower ends of intervals, as `high` has the upper ones."""
    high: str = ""
    spread: str = ""
    """Column with half-widths, in place of ends."""
    n: str = ""
    """Column with the sample size of each value. It is shown where it is below `FEWEST`, or, with
    `usual`, where it differs from that."""
    usual: str = ""
    """Column with the n that is not repeated."""
    units: str = ""
    """Column with the unit of each value, where they differ."""
    words: Mapping[Any, str] | None = None
    """Texts of values that are codes."""
    texts: Sequence[str] | pd.Series[str] | None = None
    """Texts, one a row of the frame, in place of formatted values."""
    missing: str = MISSING
    """Text of a missing value."""
    is_left: bool = False
    """Whether the column names the row: flush left, and kept where all its values are missing."""


@dataclass(frozen=True)
class Table:
    """A whole table, and the columns and rows of it that are shown."""

    name: str
    """File name without its ending: `tables/<name>.csv`, `paper/tables/<name>.tex`."""
    title: str
    frame: pd.DataFrame
    """All rows and columns of the CSV file; rows name the runs behind them."""
    columns: Sequence[Column]
    """Columns that are shown; those that name the row come first."""
    rows: Sequence[int] | None = None
    """Positions of the rows that are shown; None: all of them."""
    footnotes: Sequence[Sequence[object] | pd.Series[Any]] = ()
    """Columns of texts, each with one a row of the frame, or a missing value."""
    notes: Sequence[str] = ()
    """Lines under the table, definitions among them."""
    bold: Collection[tuple[int, str]] = ()
    """Values in bold, by position of the row and name of the column; a note says why."""
    lead: Sequence[int] = ()
    """Positions of the rows that are shown first where there is no room for all."""
    hidden: Collection[str] = ()
    """Columns of the frame that are in no file."""

    @property
    def positions(self) -> list[int]:
        """Positions of the rows that are shown."""
        return list(range(len(self.frame)) if self.rows is None else self.rows)

    @cached_property
    def filled(self) -> dict[Column, tuple[str, list[str]]]:
        """Header and texts of the columns that say anything of a row that is shown."""
        filled = {}
        for column in self.columns:
            header, texts = _column_texts(column, self.frame, self.positions)
            if not set(texts) <= ({""} if column.is_left else {"", MISSING}):
                filled[column] = header, texts
        return filled

    @cached_property
    def texts(self) -> Texts:
        """The rows that are shown."""
        rows, filled = self.positions, self.filled
        footnotes = [list(texts) for texts in self.footnotes]
        row_notes = [
            [texts[row] for texts in footnotes if isinstance(texts[row], str)] for row in rows
        ]
        all_notes = dict.fromkeys(itertools.chain(*row_notes))
        letters = {note: _letter(place) for place, note in enumerate(all_notes)}
        place = {row: index for index, row in enumerate(rows)}
        return Texts(
            title=outgoing(self.title),
            headers=[outgoing(header) for header, _ in filled.values()],
            rows=[
                [outgoing(text) for text in row]
                for row in zip(*(texts for _, texts in filled.values()), strict=True)
            ],
            keys=[_sort_keys(column, self.frame, rows) for column in filled],
            n_left=sum(column.is_left for column in filled),
            marks=[
                [letters[note] for note in sorted(notes, key=letters.__getitem__)]
                for notes in row_notes
            ],
            footnotes={letter: outgoing(str(note)) for note, letter in letters.items()},
            notes=[outgoing(note) for note in self.notes],
            bold={
                (place[row], index)
                for index, column in enumerate(filled)
                for row, name in self.bold
                if name == column.name and row in place
            },
        )

    def shortened(self, max_rows: int = MAX_ROWS) -> Table:
        """Keep the rows of `lead`, then those with a bold figure, then the first ones; note it."""
        rows = self.positions
        if len(rows) <= max_rows:
            return self
        place = {row: index for index, row in enumerate(self.lead)}
        marked = {row for row, _ in self.bold}
        first = sorted(rows, key=lambda row: (place.get(row, len(rows)), row not in marked))
        kept_rows = first[:max_rows]
        rule = "those with a bold figure, and the first of the others" if marked else "the first"
        if place:
            rule = f"those at the best settings of the update, then {rule}"
        note = f"{max_rows} of {len(rows)} rows are shown: {rule}. The CSV file has all."
        return replace(
            self, rows=kept_rows if place else sorted(kept_rows), notes=[note, *self.notes]
        )


@dataclass(frozen=True)
class Texts:
    """A table as texts without secrets or control characters, before any markup."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    keys: Sequence[Sequence[float | None] | None]
    """Numbers that sort the rows, a column each. A column that is None sorts by its texts."""
    n_left: int
    """Columns that name the row."""
    marks: Sequence[Sequence[str]]
    """Letters of the footnotes of each row, set behind its last left column."""
    footnotes: Mapping[str, str]
    notes: Sequence[str]
    bold: Collection[tuple[int, int]]
    """By row and column."""


def _column_texts(
    column: Column, frame: pd.DataFrame, rows: Sequence[int]
) -> tuple[str, list[str]]:
    """Write the header and the texts of a column."""
    header = column.header or column.name.replace("_", " ")
    if column.texts is not None:
        texts = list(column.texts)
        return header, [str(texts[row]) for row in rows]
    scale = Scale(column.unit, 1.0)
    if column.unit in _SCALES:
        scale = _SCALES[column.unit](_floats(frame, column.name))
    header = f"{header} ({scale.unit})" if scale.unit else header
    values = list(_value_texts(column, frame.iloc[list(rows)], scale))
    # An n that all values share moves into the header.
    n_texts = [n_text for text, n_text in values if not text.startswith((MISSING, column.missing))]
    if len(n_texts) > 1 and len(set(n_texts)) == 1 and n_texts[0]:
        return f"{header}, {n_texts[0]}", [text for text, _ in values]
    return header, [f"{text} ({n_text})" if n_text else text for text, n_text in values]


def _value_texts(column: Column, rows: pd.DataFrame, scale: Scale) -> Iterator[tuple[str, str]]:
    """Yield each value as a text, with its n as a text or empty."""
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
        if unit in _SCALES:
            value_scale = _SCALES[unit]([value])
        else:
            value_scale = Scale(str(unit or ""), scale.factor)
        factor, is_missing = value_scale.factor, np.isnan(value)
        is_few = n < FEWEST and not is_missing
        ends = (np.nan, np.nan) if is_few else (low * factor, high * factor)
        text = _with_ends(column, value * factor, ends, spread * factor)
        text = f"{text} {value_scale.unit}" if value_scale.unit and not is_missing else text
        has_n = 0 < n != usual and not is_missing if column.usual else is_few
        yield text, f"n = {n:.0f}" if has_n else ""


def _floats(frame: pd.DataFrame, name: str) -> list[float]:
    if not name:
        return [np.nan] * len(frame)
    return pd.to_numeric(frame[name]).astype(float).tolist()


def _with_ends(column: Column, value: float, ends: tuple[float, float], spread: float) -> str:
    digits = column.format
    value_text, low_text, high_text = (
        significant(number, digits) if isinstance(digits, int) else format(number, digits)
        for number in (value, *ends)
    )
    if np.isnan(value):
        if not ends[0] > 0:
            return column.missing
        bound = f"≥ {low_text}"
        return bound if column.missing == MISSING else f"{column.missing} ({bound})"
    if column.spread and isinstance(digits, int):
        return spread_text(value, spread, digits)
    return value_text if np.isnan(ends).any() else f"{value_text} [{low_text}, {high_text}]"


def _sort_keys(
    column: Column, frame: pd.DataFrame, rows: Sequence[int]
) -> list[float | None] | None:
    """Return the numbers that sort a column; None where its values are no numbers."""
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
