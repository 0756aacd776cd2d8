r"""A table as LaTeX: booktabs rules, and columns of a given width in which TeX breaks the lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from batchscape.analysis.commands import split_command
from batchscape.analysis.numbers import TIMES
from batchscape.analysis.report.table import Table, Texts
from batchscape.outgoing import outgoing

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
    "\N{ZERO WIDTH SPACE}": r"\allowbreak{}",
    "\N{NO-BREAK SPACE}": "~",
}
_SUPERSCRIPTS = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"
_DIGITS = str.maketrans(_SUPERSCRIPTS, "-0123456789")
_LONG_WORD = re.compile(r"\S{15,}")
_BREAKS = re.compile(r"[/_=:;,.\-](?=\w)|\w{14}(?=\w)")
"""Where a long word, such as a path or a hash, may break."""
_ROOM = {r"\small": 100, r"\footnotesize": 114, r"\scriptsize": 132}
"""Letters of a line of the page, by font. The largest font in which no line breaks is used."""


def to_latex(table: Table, *, is_long: bool = True) -> str:
    r"""Write a table for `\bsTable`: a `longtable` over pages, or a `tabular` for a float."""
    texts = table.texts
    font, widths, rows = _layout(texts)
    flush = [r"\raggedright" if i < texts.n_left else r"\raggedleft" for i in range(len(widths))]
    kinds = "".join(
        rf">{{{side}\arraybackslash}}p{{\dimexpr {width:.4f}\linewidth-2\tabcolsep}}"
        for side, width in zip(flush, widths, strict=True)
    )
    heads = _row([rf"\textbf{{{escape_latex(header)}}}" for header in texts.headers])
    begin = [r"\toprule", heads, r"\midrule"]
    name = "tabular"
    if is_long:
        name = "longtable"
        caption = rf"\caption{{\bsTitle}}\label{{tab:{table.name}}}\\"
        begin = [caption, *begin, r"\endfirsthead", *begin, r"\endhead", r"\bottomrule\endlastfoot"]
    feet = [
        rf"\textsuperscript{{{mark}}}~{escape_latex(_without_command(text))}"
        for mark, text in texts.footnotes.items()
    ]
    notes = [escape_latex(_without_command(note)) for note in texts.notes]
    paragraphs = [
        rf"\noindent {text}\par" for text in ("\\quad\n".join(feet), "\n".join(notes)) if text
    ]
    return "\n".join(
        [
            rf"\begingroup{font}\setlength{{\tabcolsep}}{{2pt}}",
            rf"\begin{{{name}}}{{@{{}}{kinds}@{{}}}}",
            *begin,
            *(_row(_cells(texts, number, row)) for number, row in enumerate(rows)),
            *([] if is_long else [r"\bottomrule"]),
            rf"\end{{{name}}}\par",
            *(["{\\raggedright\\footnotesize", *paragraphs, "}"] if paragraphs else []),
            r"\endgroup",
            "",
        ]
    )


def _layout(texts: Texts) -> tuple[str, list[float], Sequence[Sequence[str]]]:
    """Choose the font, the part of the line of each column, and whether numbers may break."""
    # A number with its spread, and its n, stay on one line.
    rows = [
        [
            re.sub("(?<=[±=]) | (?=[±=])", "\N{NO-BREAK SPACE}", cell) if len(cell) < 40 else cell
            for cell in row
        ]
        for row in texts.rows
    ]
    full_widths = _widths(texts.headers, rows, lambda text: [text])
    for font, room in _ROOM.items():
        if sum(full_widths) <= room:
            return font, [width / room for width in full_widths], rows
    least_widths = _widths(texts.headers, rows, _words)
    if sum(least_widths) > room:
        rows = [list(row) for row in texts.rows]
        least_widths = _widths(texts.headers, rows, _words)
    for most in range(max(full_widths), 0, -1):
        widths = [max(low, min(w, most)) for low, w in zip(least_widths, full_widths, strict=True)]
        if sum(widths) <= room:
            break
    return font, [width / max(room, sum(widths)) for width in widths], rows


def _widths(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    parts: Callable[[str], Sequence[str]],
) -> list[int]:
    """Return the letters of the longest part of a text, or word of a header, column by column."""
    columns = zip(headers, *rows, strict=True)
    return [
        2 + max(map(len, [*head.split(), *(part for text in texts for part in parts(text))]))
        for head, *texts in columns
    ]


def _words(text: str) -> list[str]:
    return re.split("[ \N{ZERO WIDTH SPACE}]", _breakable(text))


def _cells(texts: Texts, number: int, row: Sequence[str]) -> list[str]:
    cells = [
        rf"\textbf{{\boldmath {cell}}}" if (number, column) in texts.bold else cell
        for column, cell in enumerate(map(escape_latex, row))
    ]
    if marks := texts.marks[number]:
        cells[texts.n_left - 1] += rf"\textsuperscript{{{','.join(marks)}}}"
    return cells


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\[1.5pt]"


def _without_command(text: str) -> str:
    """Leave out the sentence that ends in a command, which nobody runs from a printed page."""
    before, command = split_command(text)
    return before[: before.rfind(". ") + 1] if command else text


def escape_latex(text: str) -> str:
    r"""Write text for LaTeX, on one line; a letter without a command becomes `[U+4E2D]`."""
    text = re.sub("[ \\t\\r\\n]+", " ", outgoing(text))
    text = re.sub(r"(?<=[\w)]) x (?=[\w(])", f" {TIMES} ", text)
    # A minus is wider than a hyphen.
    text = re.sub(r"(?<![\w)-])-(?=[\d.∞])", "\N{MINUS SIGN}", text)
    pieces = re.split(f"([{_SUPERSCRIPTS}]+)", _breakable(text))
    return "".join(
        f"$^{{{piece.translate(_DIGITS)}}}$" if index % 2 else "".join(map(_letter, piece))
        for index, piece in enumerate(pieces)
    )


def _breakable(text: str) -> str:
    def broken(word: re.Match[str]) -> str:
        return _BREAKS.sub(lambda match: match[0] + "\N{ZERO WIDTH SPACE}", word[0])

    return _LONG_WORD.sub(broken, text)


def _letter(letter: str) -> str:
    if letter in _LATEX:
        return _LATEX[letter]
    return letter if " " <= letter <= "~" else f"{{[}}U+{ord(letter):04X}{{]}}"
