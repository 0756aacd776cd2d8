"""One small table of texts, and its three twins: Markdown, LaTeX and terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.segment import Segments
from rich.table import Table

from batchscape.analysis.numbers import TIMES

__all__ = ["Grid", "escape_latex", "escape_markdown", "show", "to_latex", "to_markdown"]

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    # The dollar of the text fonts needs one that a small installation has only as bitmaps.
    "$": r"$\mathdollar$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # Braces keep a bracket or star from being an argument of the row end before it, and keep
    # quotes and hyphens from joining into other letters.
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    '"': "{''}",
    "'": "{'}",
    "`": "{`}",
    "-": "{-}",
    "±": r"$\pm$",
    TIMES: r"$\times$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "∞": r"$\infty$",
    "Δ": r"$\Delta$",
    "→": r"$\to$",
    "·": r"$\cdot$",
    "µ": r"$\mu$",
    "\N{EN DASH}": "--",
    "—": "---",
    "…": r"\ldots{}",
}
_HEADER_WIDTH = 12
_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


@dataclass(frozen=True)
class Grid:
    """Texts of a table, before any markup."""

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

    def marked_rows(self) -> list[tuple[Sequence[str], Sequence[str]]]:
        """Pair each row with its footnote letters."""
        marks = self.marks or [()] * len(self.rows)
        return list(zip(self.rows, marks, strict=True))


def to_markdown(grid: Grid) -> str:
    """Write a grid as a GitHub table with its notes underneath."""
    left = grid.n_left
    rules = [":---" if i < left else "---:" for i in range(len(grid.headers))]
    lines = [[escape_markdown(header) for header in grid.headers], rules]
    for row, marks in grid.marked_rows():
        cells = [escape_markdown(text) for text in row]
        if marks:
            cells[left - 1] += f" <sup>{','.join(marks)}</sup>"
        lines.append(cells)
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    feet = [f"<sup>{mark}</sup> {escape_markdown(text)}" for mark, text in grid.footnotes.items()]
    notes = [escape_markdown(note) for note in grid.notes]
    # Two trailing spaces break the line without starting a paragraph.
    under = "".join(f"\n{line}  " for line in [*feet, *notes])
    return f"{table}\n{under}\n" if under else f"{table}\n"


def to_latex(grid: Grid) -> str:
    """Write a grid as a `tabular` with booktabs rules; it needs no other package."""
    left = grid.n_left
    columns = "l" * left + "r" * (len(grid.headers) - left)
    lines = [rf"\noindent\begin{{tabular}}{{@{{}}{columns}@{{}}}}", r"\toprule"]
    lines += [*_latex_header(grid), r"\midrule"]
    for row, marks in grid.marked_rows():
        cells = [escape_latex(text) for text in row]
        if marks:
            cells[left - 1] += rf"\textsuperscript{{{','.join(marks)}}}"
        lines.append(_latex_row(cells))
    lines += [r"\bottomrule", r"\end{tabular}"]
    feet = [
        rf"\textsuperscript{{{mark}}}~{escape_latex(text)}" for mark, text in grid.footnotes.items()
    ]
    feet += [escape_latex(note) for note in grid.notes]
    if feet:
        lines += ["", r"\par\smallskip{\footnotesize\raggedright", *[f"{f}\\par" for f in feet]]
        lines += ["}"]
    return "% Needs \\usepackage{booktabs}\n" + "\n".join(lines) + "\n"


def show(console: Console, grid: Grid, title: str, max_rows: int = 50) -> None:
    """Print a grid in a terminal: its title, its rows, its footnotes.

    Lines break between words, never within a number; where even that is too wide, lines are
    longer than the terminal.

    Parameters
    ----------
    console : rich.console.Console
    grid : Grid
    title : str
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
    widths = _fit(wanted, least, console.width - len(headers))
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    for index, (header, width) in enumerate(zip(headers, widths, strict=True)):
        justify: Literal["left", "right"] = "left" if index < left else "right"
        table.add_column(escape(header), justify=justify, width=width)
    for line in lines:
        table.add_row(*map(escape, line))
    console.print(escape(f"{title} ({grid.short_first}: {grid.headers[0]})"), highlight=False)
    # A console never prints wider than it is, so the table is rendered at its own width.
    options = console.options.update(width=sum(widths) + len(headers))
    console.print(Segments(console.render(table, options)), crop=False, soft_wrap=True, end="")
    if len(grid.rows) > max_rows:
        console.print(f"... and {len(grid.rows) - max_rows} more rows in the files")
    used = {mark for _, marks in rows for mark in marks}
    for mark, text in grid.footnotes.items():
        if mark in used:
            console.print(escape(f"({mark}) {text}"), highlight=False)
    console.print()


def escape_markdown(text: str) -> str:
    """Write text so that Markdown shows it as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|~#&])", r"\\\1", " ".join(text.split()))


def escape_latex(text: str) -> str:
    r"""Write text so that LaTeX shows it as it is, on one line.

    A character outside ASCII that has no plain command is written as its code point, as in
    `[U+4E2D]`: it always compiles, and nothing is lost.
    """
    pieces = re.split("([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", " ".join(text.split()))
    return "".join(
        f"$^{{{piece.translate(_DIGITS)}}}$" if index % 2 else "".join(map(_latex_letter, piece))
        for index, piece in enumerate(pieces)
    )


def _fit(wanted: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Narrow the widest columns until all fit the room, or none can give any more."""
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


def _latex_letter(letter: str) -> str:
    if letter in _LATEX:
        return _LATEX[letter]
    return letter if " " <= letter <= "~" else f"{{[}}U+{ord(letter):04X}{{]}}"


def _latex_header(grid: Grid) -> list[str]:
    """Break headers over lines no wider than their column, so that the table fits a page."""
    columns = list(zip(*grid.rows, strict=True)) or [()] * len(grid.headers)
    wrapped = [
        wrap(header, max([_HEADER_WIDTH, *map(len, column)]), break_long_words=False)
        for header, column in zip(grid.headers, columns, strict=True)
    ]
    depth = max(map(len, wrapped))
    lines = zip(*([""] * (depth - len(parts)) + parts for parts in wrapped), strict=True)
    return [_latex_row([escape_latex(part) for part in line]) for line in lines]


def _latex_row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"
