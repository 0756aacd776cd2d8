"""One small table of texts, as Markdown and in a terminal; `latex` writes it for a paper."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from batchscape.analysis.estimates import NOT_IDENTIFIED
from batchscape.analysis.numbers import MISSING, TIMES
from batchscape.outgoing import outgoing
from batchscape.text import count_text

__all__ = [
    "GEOMETRY_HEADER",
    "MAX_ROWS",
    "Column",
    "Grid",
    "columns_grid",
    "escape_markdown",
    "fit_widths",
    "group_column",
    "lettered",
    "printed",
    "shorten",
    "show",
    "to_markdown",
]

GEOMETRY_HEADER = f"devices {TIMES} micro {TIMES} accumulation = global"
"""Header of a column of geometries."""

_N = re.compile(r" \((n ?= ?\d+)\)$")
_UNIT = re.compile(r"( \(.*\))?(, n ?= ?\d+)?$")
"""What stands behind the name of a figure in a header."""

_SHORT = {
    GEOMETRY_HEADER: "geometry",
    "phase of a run": "phase",
    "planned geometry": "planned",
    "scaling, and what stays equal": "scaling",
}
"""What a first column is called where there is little room."""

Column = tuple[str, Iterable[str]]
"""Header and texts of a column."""

MAX_ROWS = 40
"""Rows of a long table that page, Markdown and LaTeX show: about what one printed page holds."""
_PRINTED_ROWS = 20
"""Rows of a wide table, which is set as two, of which a printed page has room for all."""


@dataclass(frozen=True)
class Grid:
    """Texts of a table, before any markup; as they may leave, whoever made them."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    short_first: str = ""
    """Header of the first column where there is little room; the title then explains it."""
    n_left: int = 1
    """Columns, from the first, that are set flush left; the others are set flush right."""
    marks: Sequence[Sequence[str]] = ()
    """Letters of the footnotes that each row refers to, set behind its last left column."""
    footnotes: dict[str, str] = field(default_factory=dict)
    """Texts by letter."""
    notes: Sequence[str] = ()
    """Lines under the table, definitions among them."""
    bold: Collection[tuple[int, int]] = ()
    """Cells set in bold, as (row, column) from zero; a note must say what bold means."""
    lead: Sequence[int] = ()
    """Rows that are shown first where there is no room for all; a note must say which."""
    spare: Collection[str] = ()
    """Headers without unit of columns that a paper leaves out, with the notes that begin with them;
    of those on the left, where all rows say the same."""

    def __post_init__(self) -> None:
        """Clean the texts here, once for all formats: later they are cut and escaped."""
        cleaned = {
            "headers": [outgoing(text) for text in self.headers],
            "rows": [[outgoing(text) for text in row] for row in self.rows],
            "footnotes": {mark: outgoing(text) for mark, text in self.footnotes.items()},
            "notes": [outgoing(text) for text in self.notes],
        }
        for name, texts in cleaned.items():
            object.__setattr__(self, name, texts)

    def marked_rows(self) -> list[tuple[Sequence[str], Sequence[str]]]:
        """Pair each row with its footnote letters."""
        marks = self.marks or [()] * len(self.rows)
        return list(zip(self.rows, marks, strict=True))


def columns_grid(
    left: Sequence[Column],
    right: Sequence[Column],
    *,
    notes: Sequence[str] = (),
    footnoted: tuple[Sequence[Sequence[str]], dict[str, str]] = ((), {}),
    bold: Collection[tuple[int, int]] = (),
    lead: Sequence[int] = (),
    spare: Collection[str] = (),
) -> Grid:
    """Put columns side by side, without those on the right that hold nothing in any row.

    An n behind every number of a column, and always the same, is said in its header instead.

    Parameters
    ----------
    left, right : sequence of Column
        Those that are set flush left, of which there is one at least, and the others.
    notes, bold, lead, spare
        As in `Grid`.
    footnoted : tuple
        As `lettered` returns it.
    """
    columns = [(header, list(texts)) for header, texts in left]
    columns += [_with_one_n(header, list(texts)) for header, texts in right]
    kept = _filled([texts for _, texts in columns], len(left))
    headers = [columns[i][0] for i in kept]
    rows = zip(*(columns[i][1] for i in kept), strict=True)
    return Grid(
        headers=headers,
        rows=[list(row) for row in rows],
        short_first=_SHORT.get(headers[0], headers[0]),
        n_left=len(left),
        marks=footnoted[0],
        footnotes=footnoted[1],
        notes=notes,
        bold=frozenset((row, kept.index(column)) for row, column in bold),
        lead=lead,
        spare=spare,
    )


def _filled(columns: Iterable[Iterable[str]], n_left: int) -> list[int]:
    """Find the columns to show: those on the left, and the others that hold anything."""
    return [i for i, texts in enumerate(columns) if i < n_left or set(texts) != {MISSING}]


def _with_one_n(header: str, texts: list[str]) -> tuple[str, list[str]]:
    """Move the n of a column's numbers to its header, where several have the same and none another.

    What is missing or not identified has no n.
    """
    found = [_N.search(text) for text in texts if not text.startswith((MISSING, NOT_IDENTIFIED))]
    counts = {match and match[1] for match in found}
    if len(found) < 2 or len(counts) > 1 or None in counts:
        return header, texts
    return f"{header}, {counts.pop()}", [_N.sub("", text) for text in texts]


def group_column(labels: Iterable[str]) -> list[Column]:
    """Return a column of labels of groups; none where there is one group, which has no label."""
    texts = list(labels)
    return [("group", texts)] if any(texts) else []


def to_markdown(grid: Grid) -> str:
    """Write a grid as a GitHub table with its notes underneath."""
    left = grid.n_left
    rules = [":---" if i < left else "---:" for i in range(len(grid.headers))]
    lines = [[_escaped(header) for header in grid.headers], rules]
    for index, (row, marks) in enumerate(grid.marked_rows()):
        cells = [_escaped(text) for text in row]
        cells = [f"**{text}**" if (index, c) in grid.bold else text for c, text in enumerate(cells)]
        if marks:
            cells[left - 1] += f" <sup>{','.join(marks)}</sup>"
        lines.append(cells)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    feet = [f"<sup>{mark}</sup> {_escaped(text)}" for mark, text in grid.footnotes.items()]
    notes = [_escaped(note) for note in grid.notes]
    # Two trailing spaces break the line without starting a paragraph.
    under = "".join(f"\n{line}  " for line in [*feet, *notes])
    return f"{table}\n{under}\n" if under else f"{table}\n"


def show(console: Console, grid: Grid, title: str, max_rows: int = 50) -> None:
    """Print a grid in a terminal: its title, its rows, its footnotes.

    Lines break between words, never within a number; where even that is too wide, lines are
    longer than the terminal.

    Parameters
    ----------
    max_rows : int
        Rows to show; a line counts the others.
    """
    rows = grid.marked_rows()[:max_rows]
    left = grid.n_left
    lines = [[*row[:left], *map(_tight, row[left:])] for row, _ in rows]
    for line, (_, marks) in zip(lines, rows, strict=True):
        line[left - 1] += f" ({','.join(marks)})" if marks else ""
    headers = [grid.short_first, *grid.headers[1:]]
    columns = [[line[index] for line in lines] for index in range(len(headers))]
    words = [
        [cell_len(word) for word in " ".join([header, *column]).split()]
        for header, column in zip(headers, columns, strict=True)
    ]
    least = [max(lengths, default=1) for lengths in words]
    wanted = [max([low, *map(cell_len, c)]) for low, c in zip(least, columns, strict=True)]
    widths = fit_widths(wanted, least, console.width - len(headers))
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    for index, (header, width) in enumerate(zip(headers, widths, strict=True)):
        justify: Literal["left", "right"] = "left" if index < left else "right"
        table.add_column(Text(header), justify=justify, width=width)
    for index, line in enumerate(lines):
        styles = ["bold" if (index, c) in grid.bold else "" for c in range(len(line))]
        table.add_row(*(Text(text, style) for text, style in zip(line, styles, strict=True)))
    in_full = grid.headers[0]
    explained = title if grid.short_first == in_full else f"{title} ({grid.short_first}: {in_full})"
    console.print(Text(explained), highlight=False)
    # A console never prints wider than it is, so the table is rendered at its own width.
    options = console.options.update(width=sum(widths) + len(headers))
    console.print(Segments(console.render(table, options)), crop=False, soft_wrap=True, end="")
    if more := len(grid.rows[max_rows:]):
        console.print(f"... and {count_text(more, 'more row')} in the files")
    used = {mark for _, marks in rows for mark in marks}
    for mark, text in grid.footnotes.items():
        if mark in used:
            console.print(Text(f"({mark}) {text}"), highlight=False)
    console.print()


def escape_markdown(text: str) -> str:
    """Write text so that Markdown shows it as it is, on one line."""
    return _escaped(outgoing(text))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|~#&])", r"\\\1", " ".join(text.split()))


def shorten(grid: Grid, max_rows: int = MAX_ROWS) -> Grid:
    """Keep what a page can show of a long table, and say so under it.

    Parameters
    ----------
    max_rows : int
        Rows to keep: the first of `lead`, those with a bold cell, the first of the others; in the
        order of the table, or of `lead` where all are of it.

    Returns
    -------
    Grid
        The same one where it is short enough; else without the footnotes of the rows left out, and
        without columns that hold nothing in the others.
    """
    total = len(grid.rows)
    if total <= max_rows:
        return grid
    marked = {row for row, _ in grid.bold}
    lead = {row: place for place, row in enumerate(grid.lead)}
    first = sorted(range(total), key=lambda row: (lead.get(row, total), row not in marked, row))
    kept = first[:max_rows]
    if len(lead) < max_rows:
        kept.sort()
    rows = grid.marked_rows()
    used = {mark for row in kept for mark in rows[row][1]}
    which = "those with a bold figure, and the first of the others" if marked else "the first ones"
    if grid.lead:
        best = "those at the best settings of the update"
        which = f"{best}, then {which}" if len(grid.lead) < max_rows else best
        which = f"{best}, one of each global batch first" if len(grid.lead) > max_rows else which
    note = f"{max_rows} of {total} rows are shown: {which}. The CSV file of this table has all."
    columns = _filled(zip(*(rows[row][0] for row in kept), strict=True), grid.n_left)
    return _taken(
        replace(
            grid,
            footnotes={mark: text for mark, text in grid.footnotes.items() if mark in used},
            notes=[note, *grid.notes],
            lead=(),
        ),
        kept,
        columns,
    )


def printed(grid: Grid) -> Grid:
    """Keep what a paper has room for: the leading rows of a long table, and no spare column."""
    long = len(grid.rows) > _PRINTED_ROWS
    short = shorten(grid, min(len(grid.lead), MAX_ROWS) if long and grid.lead else MAX_ROWS)
    names = [_UNIT.sub("", header) for header in short.headers]
    left_out = [
        index
        for index, name in enumerate(names)
        if name in grid.spare
        if index >= short.n_left or len({row[index] for row in short.rows}) < 2
    ]
    columns = [index for index in range(len(names)) if index not in left_out]
    gone = tuple(f"{name}:" for name in set(grid.spare) - {names[index] for index in columns})
    notes = [note for note in short.notes if not note.startswith(gone)]
    if figures := [names[index] for index in left_out if index >= short.n_left]:
        notes.append(f"In the CSV file alone: {', '.join(figures)}.")
    return _taken(replace(short, notes=notes), range(len(short.rows)), columns)


def _taken(grid: Grid, rows: Sequence[int], columns: Sequence[int]) -> Grid:
    """Keep some rows and columns; what is bold or marked stays so."""
    place = {row: index for index, row in enumerate(rows)}
    return replace(
        grid,
        headers=[grid.headers[column] for column in columns],
        rows=[[grid.rows[row][column] for column in columns] for row in rows],
        n_left=sum(column < grid.n_left for column in columns),
        marks=[grid.marks[row] for row in rows] if grid.marks else (),
        bold=frozenset(
            (place[row], columns.index(column))
            for row, column in grid.bold
            if row in place and column in columns
        ),
    )


def lettered(texts: Sequence[Sequence[object]]) -> tuple[list[list[str]], dict[str, str]]:
    """Give each distinct text a letter: `marks` and `footnotes` of a grid.

    Parameters
    ----------
    texts : sequence of sequence
        For each row its texts; what is no text, such as None or NaN, has no letter.

    Returns
    -------
    list of list of str
        For each row its letters.
    dict of str to str
        Texts by letter, in the order of the rows.
    """
    letters: dict[str, str] = {}
    marks = []
    for row in texts:
        found = [text for text in row if isinstance(text, str)]
        for text in found:
            letters.setdefault(text, _letter(len(letters)))
        marks.append(sorted((letters[text] for text in found), key=lambda mark: (len(mark), mark)))
    return marks, {letter: text for text, letter in letters.items()}


def _letter(index: int) -> str:
    """Return a, b, ... z, aa, ab, ..."""
    quotient, remainder = divmod(index, 26)
    return (_letter(quotient - 1) if quotient else "") + chr(ord("a") + remainder)


def fit_widths(wanted: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Narrow the widest columns until all fit the room, or none can give any more.

    Parameters
    ----------
    wanted, least : sequence of int
        Widths of the columns: as they would be, and as narrow as they can be.
    room : int
        What their sum should not exceed.
    """
    widths = list(wanted)
    while sum(widths) > room:
        spare = [(width, i) for i, width in enumerate(widths) if width > least[i]]
        if not spare:
            break
        widths[max(spare)[1]] -= 1
    return widths


def _tight(number: str) -> str:
    """Leave only the gaps where a narrow terminal may break a number."""
    return number.replace("± ", "±").replace(f" {TIMES} ", TIMES)
