r"""A table as LaTeX: booktabs rules, and no wider than the text of a page.

The text of an article at 10 pt is 345 pt wide. A table that is wider is set in a smaller font,
then with broken lines of text, then as several tables one under the other that repeat the first
columns. The font is never smaller than `\scriptsize`. Rows that are higher than a page are parted
likewise. Footnotes and notes run on under the last of these tables, without the commands that a
page for the screen ends them with; footnotes that would fill the page are cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap
from typing import NamedTuple

from batchscape.analysis.commands import part_command
from batchscape.analysis.numbers import TIMES
from batchscape.analysis.report.grids import Grid, fit_widths
from batchscape.outgoing import outgoing

__all__ = ["escape_latex", "escape_long", "to_latex"]

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
    "≈": r"$\approx$",
    "∞": r"$\infty$",
    "Δ": r"$\Delta$",
    "→": r"$\to$",
    "·": r"$\cdot$",
    "µ": r"$\mu$",
    "\N{GREEK SMALL LETTER ALPHA}": r"$\alpha$",
    "\N{GREEK SMALL LETTER BETA}": r"$\beta$",
    "\N{GREEK SMALL LETTER GAMMA}": r"$\gamma$",
    "\N{GREEK SMALL LETTER SIGMA}": r"$\sigma$",
    "\N{MINUS SIGN}": "$-$",
    "\N{EN DASH}": "--",
    "—": "---",
    "…": r"\ldots{}",
}
_SUPERSCRIPTS = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"
_DIGITS = str.maketrans(_SUPERSCRIPTS, "-0123456789")

_ROOM_PT = 345.0
_HIGHEST_PT = 440.0
"""Of a tabular with its headers: the text of an article is 550 pt high, and a caption stands above
the first one."""


class _Size(NamedTuple):
    """A font size of the article class at 10 pt."""

    name: str
    scale: float
    """Width of its letters over those of 10 pt: small ones of Computer Modern are wide for their
    height."""
    gap: float
    """On each side of a column, in pt."""
    line: float
    """Height of a row, in pt."""


_SIZES = (
    _Size(r"\normalsize", 1.0, 6.0, 12.0),
    _Size(r"\small", 0.93, 4.0, 11.0),
    _Size(r"\footnotesize", 0.86, 3.5, 9.5),
    _Size(r"\scriptsize", 0.81, 3.0, 8.0),
)
# Widths in pt at 10 pt: metrics of Computer Modern Roman, rounded up.
_WIDTHS = {
    letter: width
    for width, letters in (
        (2.8, ".,:;'|!`ijl[]_"),
        (3.4, "f- "),
        (4.0, "rst()I"),
        (4.5, "cez"),
        (4.6, _SUPERSCRIPTS),
        (5.0, '0123456789ago/?*"^~'),
        (5.3, "vkxyJ{}"),
        (5.6, "bdhnpquS"),
        (7.3, "w"),
        (8.4, "m%#"),
        (10.3, "MW—…"),
    )
    for letter in letters
}
_OTHER_PT, _UNKNOWN_PT = 7.9, 45.0
_BOLD = 1.16
_MARK_PT = 4.2
_ROW_GAP_PT = 2
"""Between rows whose lines are broken, which would run together."""
_HEADER_WIDTH = 9
_TEXT_PT = 130.0
"""Columns wider than this hold sentences, whose lines may be broken; so may left columns."""
_READABLE_PT = 80.0
"""What broken lines should not be narrower than, where there is a choice."""
_LONG_WORD = 14
_FOOTNOTE_LINES = 24
"""What all footnotes of a table may take: less than half of a page."""
_FOOTNOTE_SCALE = 0.86
"""Width of the letters of footnotes over those of 10 pt."""
_IN_FULL = "Footnotes that end in … are in full in the Markdown file of this table."


@dataclass(frozen=True)
class _Part:
    """Columns that stand in one tabular, with the widths in pt of those whose lines break."""

    columns: list[int]
    broken: dict[int, int]


def to_latex(grid: Grid) -> str:
    r"""Write a grid as one or more `tabular` with booktabs rules; it needs no other package.

    Returns
    -------
    str
        To be read by `\input`, in a `table` (over both columns: `table*`) or between paragraphs.
    """
    size, parts = _layout(grid)
    lines = [
        "% Needs \\usepackage{booktabs}",
        rf"\begingroup{size.name}\setlength{{\tabcolsep}}{{{size.gap:g}pt}}",
    ]
    tabulars = [_tabular(grid, part, rows) for part in parts for rows in _pages(grid, part, size)]
    for index, tabular in enumerate(tabulars):
        lines += [r"\par\medskip"] if index else []
        lines += tabular
    lines += [r"\par\endgroup"]
    whole = {mark: _without_command(text) for mark, text in grid.footnotes.items()}
    footnotes = _shortened(whole)
    feet = [rf"\textsuperscript{{{mark}}}~{_long(text)}" for mark, text in footnotes.items()]
    if footnotes != whole:
        feet.append(_long(_IN_FULL))
    notes = [_long(_without_command(note)) for note in grid.notes]
    under = [rf"\noindent {text}\par" for text in ("\\quad\n".join(feet), "\n".join(notes)) if text]
    if under:
        lines += [r"\smallskip{\footnotesize\raggedright", *under, "}"]
    return "\n".join(lines) + "\n"


def _without_command(text: str) -> str:
    """Leave out the sentence that ends in a command: nobody runs one from a printed page."""
    said, command = part_command(text)
    return said[: said.rfind(". ") + 1] if command else text


def escape_latex(text: str) -> str:
    r"""Write text so that LaTeX shows it as it is, on one line.

    A character outside ASCII that has no plain command is written as its code point, as in
    `[U+4E2D]`: it always compiles, and nothing is lost.
    """
    return _escaped(outgoing(text))


def escape_long(text: str) -> str:
    """Write a paragraph as `escape_latex` does; its long words, such as paths, may break."""
    return _long(outgoing(text))


def _escaped(text: str) -> str:
    pieces = re.split(f"([{_SUPERSCRIPTS}]+)", _signed(" ".join(text.split())))
    return "".join(
        f"$^{{{piece.translate(_DIGITS)}}}$" if index % 2 else "".join(map(_letter, piece))
        for index, piece in enumerate(pieces)
    )


def _signed(text: str) -> str:
    """Set a minus, which is wider than a hyphen, before numbers, and a sign for a lone x."""
    text = re.sub(r"(?<=[\w)]) x (?=[\w(])", f" {TIMES} ", text)
    return re.sub(r"(?<![\w)-])-(?=[\d.∞])", "\N{MINUS SIGN}", text)


def _shortened(footnotes: Mapping[str, str]) -> dict[str, str]:
    """Cut the longest footnotes at a word, so that all take no more than a part of the page."""
    words = {mark: text.split() for mark, text in footnotes.items()}
    lengths = [_width(text) for text in footnotes.values()]
    for lines in range(_FOOTNOTE_LINES, 0, -1):
        room = lines * _ROOM_PT / _FOOTNOTE_SCALE
        needed = sum(
            math.ceil(min(length, room) * _FOOTNOTE_SCALE / _ROOM_PT) for length in lengths
        )
        if needed <= _FOOTNOTE_LINES:
            break
    return {
        mark: text if _width(text) <= room else _begin(words[mark], room)
        for mark, text in footnotes.items()
    }


def _begin(words: Sequence[str], room: float) -> str:
    """Keep the first words that have room, and dots; of a single long one, its begin."""
    kept: list[str] = []
    width = _width(" …")
    for word in words:
        width += _width(f"{word} ")
        if width > room:
            break
        kept.append(word)
    return f"{' '.join(kept)} …" if kept else f"{words[0][:_LONG_WORD]} …"


def _letter(letter: str) -> str:
    if letter in _LATEX:
        return _LATEX[letter]
    return letter if " " <= letter <= "~" else f"{{[}}U+{ord(letter):04X}{{]}}"


def _long(text: str) -> str:
    """Escape text whose long words, such as paths and hashes, may break anywhere."""
    return " ".join(
        r"\allowbreak{}".join(_escaped(chunk) for chunk in _chunks(word))
        for word in _signed(text).split()
    )


def _chunks(word: str) -> list[str]:
    """Cut a long word behind its punctuation, and what is still long anywhere."""
    if len(word) <= _LONG_WORD:
        return [word]
    parts = re.findall(r"[^\W_]+[\W_]*|[\W_]+", word)
    return [part[i : i + _LONG_WORD] for part in parts for i in range(0, len(part), _LONG_WORD)]


def _layout(grid: Grid) -> tuple[_Size, list[_Part]]:
    """Choose the fewest tables, and then the largest font, that fit the width of the page."""
    attempts = [(size, _parts(grid, size.scale, size.gap)) for size in _SIZES]
    fewest = min(len(parts) for _, parts in attempts)
    return next(attempt for attempt in attempts if len(attempt[1]) == fewest)


def _pages(grid: Grid, part: _Part, size: _Size) -> list[range]:
    """Fill one page after the other: none is higher than it may be, but for a row that is alone."""
    heads = max(len(_header_lines(grid, column)) for column in part.columns)
    gap = _ROW_GAP_PT if part.broken else 0
    firsts, used = [0], size.line * heads
    for row in range(len(grid.rows)):
        height = size.line * _row_lines(grid, part, row, size.scale) + gap
        if row > firsts[-1] and used + height > _HIGHEST_PT:
            firsts.append(row)
            used = size.line * heads
        used += height
    return [range(*ends) for ends in pairwise([*firsts, len(grid.rows)])]


def _row_lines(grid: Grid, part: _Part, row: int, scale: float) -> int:
    return max(
        (_lines(grid.rows[row][column], width / scale) for column, width in part.broken.items()),
        default=1,
    )


def _lines(text: str, room: float) -> int:
    """Count the lines of a text whose long words may break."""
    lines, used = 1, 0.0
    for word in text.split():
        for chunk in _chunks(word):
            width = _width(f"{chunk} ")
            if used and used + width > room:
                lines, used = lines + 1, 0.0
            used += width
    return lines


def _parts(grid: Grid, scale: float, gap: float) -> list[_Part]:
    """Fill one table after the other; each begins with the left columns."""
    widths = [_widths(grid, column, scale) for column in range(len(grid.headers))]
    left = list(range(grid.n_left))
    parts = [left]
    for column in range(grid.n_left, len(grid.headers)):
        trial = [*parts[-1], column]
        needed = sum(widths[c].readable for c in trial)
        if parts[-1] != left and needed > _room(gap, trial):
            parts.append([*left, column])
        else:
            parts[-1] = trial
    return [_part(columns, widths, gap) for columns in parts]


def _room(gap: float, columns: list[int]) -> int:
    return int(_ROOM_PT - 2 * gap * (len(columns) - 1))


def _part(columns: list[int], widths: Sequence[_Widths], gap: float) -> _Part:
    chosen = [widths[c] for c in columns]
    wanted, readable = [w.wanted for w in chosen], [w.readable for w in chosen]
    room = _room(gap, columns)
    least = readable if sum(readable) <= room else [w.least for w in chosen]
    fitted = zip(chosen, columns, fit_widths(wanted, least, room), strict=True)
    return _Part(columns, {c: width for w, c, width in fitted if width < w.wanted})


class _Widths(NamedTuple):
    """Widths of a column in pt."""

    wanted: int
    """With no line broken."""
    readable: int
    """With broken lines that still hold a few words."""
    least: int
    """With one word a line."""


def _widths(grid: Grid, column: int, scale: float) -> _Widths:
    bold = _BOLD if any(c == column for _, c in grid.bold) else 1.0
    marks = max((_MARK_PT * (2 * len(m) - 1) for _, m in grid.marked_rows() if m), default=0.0)
    beside = marks if column == grid.n_left - 1 else 0.0
    heads = max(_width(line) for line in _header_lines(grid, column))
    texts = [row[column] for row in grid.rows]
    text = bold * max(map(_width, texts), default=0.0) + beside
    wanted = max(text, heads)
    readable = least = wanted
    if column < grid.n_left or text > _TEXT_PT:
        words = {chunk for text in texts for word in text.split() for chunk in _chunks(word)}
        least = max(bold * max(map(_width, words), default=0.0) + beside, heads)
        readable = min(wanted, max(least, _READABLE_PT))
    return _Widths(*(int(scale * width) + 1 for width in (wanted, readable, least)))


def _width(text: str) -> float:
    return sum(map(_letter_width, _signed(text)))


def _letter_width(letter: str) -> float:
    if letter in _WIDTHS:
        return _WIDTHS[letter]
    if letter.isascii() or letter in _LATEX:
        return _OTHER_PT
    return _UNKNOWN_PT


def _header_lines(grid: Grid, column: int) -> list[str]:
    """Break a header over lines no wider than its column."""
    longest = max((len(row[column]) for row in grid.rows), default=0)
    room = max(_HEADER_WIDTH, min(longest, 2 * _HEADER_WIDTH))
    return wrap(grid.headers[column], room, break_long_words=False) or [""]


def _tabular(grid: Grid, part: _Part, rows: range) -> list[str]:
    wrapped = [_header_lines(grid, column) for column in part.columns]
    depth = max(map(len, wrapped))
    padded = ([""] * (depth - len(lines)) + lines for lines in wrapped)
    heads = [[_escaped(text) for text in line] for line in zip(*padded, strict=True)]
    cells = [[_cell(grid, part, index, column) for column in part.columns] for index in rows]
    kinds = (
        f"p{{{part.broken[c]}pt}}" if c in part.broken else _flush(grid, c) for c in part.columns
    )
    lines = [rf"\noindent\begin{{tabular}}{{@{{}}{''.join(kinds)}@{{}}}}", r"\toprule"]
    lines += [*(_row(grid, part, texts) for texts in heads), r"\midrule"]
    between = [rf"\addlinespace[{_ROW_GAP_PT}pt]"] if part.broken else []
    for index, texts in enumerate(cells):
        lines += [*(between if index else []), _row(grid, part, texts)]
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _flush(grid: Grid, column: int) -> str:
    return "l" if column < grid.n_left else "r"


def _cell(grid: Grid, part: _Part, index: int, column: int) -> str:
    row, marks = grid.marked_rows()[index]
    text = _long(row[column]) if column in part.broken else _escaped(row[column])
    if (index, column) in grid.bold:
        text = rf"\textbf{{\boldmath {text}}}"
    if marks and column == grid.n_left - 1:
        text += rf"\textsuperscript{{{','.join(marks)}}}"
    return text


def _row(grid: Grid, part: _Part, cells: Sequence[str]) -> str:
    if not part.broken:
        return f"{' & '.join(cells)} \\\\"
    flush = {"l": r"\raggedright{}", "r": r"\raggedleft{}"}
    pairs = zip(part.columns, cells, strict=True)
    set_flush = [flush[_flush(grid, c)] + text if c in part.broken else text for c, text in pairs]
    # Ragged text takes the row end for the end of a line.
    return f"{' & '.join(set_flush)} \\tabularnewline"
