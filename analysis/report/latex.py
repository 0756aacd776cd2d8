r"""A table as LaTeX: booktabs rules, and columns of a given width in which TeX breaks the lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from batchscape.analysis.commands import part_command
from batchscape.analysis.numbers import TIMES
from batchscape.analysis.report.table import Table, Texts
from batchscape.outgoing import outgoing

__all__ = ["escape_latex", "to_latex"]

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
"""Letters of a line of the page, by font; the largest is taken in which no line breaks."""


def to_latex(table: Table, *, is_long: bool = True) -> str:
    r"""Write a table as a `longtable`, which may go on over pages; else as a `tabular` for a float.

    Returns
    -------
    str
        To be read by `\bsTable`; needs the packages array, booktabs and longtable.
    """
    shown = table.texts()
    font, widths, rows = _layout(shown)
    flush = [r"\raggedright" if i < shown.n_left else r"\raggedleft" for i in range(len(widths))]
    kinds = "".join(
        rf">{{{side}\arraybackslash}}p{{\dimexpr {width:.4f}\linewidth-2\tabcolsep}}"
        for side, width in zip(flush, widths, strict=True)
    )
    heads = _row([rf"\textbf{{{escape_latex(header)}}}" for header in shown.headers])
    begin = [r"\toprule", heads, r"\midrule"]
    name = "tabular"
    if is_long:
        name = "longtable"
        caption = rf"\caption{{\bsTitle}}\label{{tab:{table.name}}}\\"
        begin = [caption, *begin, r"\endfirsthead", *begin, r"\endhead", r"\bottomrule\endlastfoot"]
    feet = [
        rf"\textsuperscript{{{mark}}}~{escape_latex(_without_command(text))}"
        for mark, text in shown.footnotes.items()
    ]
    notes = [escape_latex(_without_command(note)) for note in shown.notes]
    under = [rf"\noindent {text}\par" for text in ("\\quad\n".join(feet), "\n".join(notes)) if text]
    return "\n".join(
        [
            rf"\begingroup{font}\setlength{{\tabcolsep}}{{2pt}}",
            rf"\begin{{{name}}}{{@{{}}{kinds}@{{}}}}",
            *begin,
            *(_row(_cells(shown, number, texts)) for number, texts in enumerate(rows)),
            *([] if is_long else [r"\bottomrule"]),
            rf"\end{{{name}}}\par",
            *(["{\\raggedright\\footnotesize", *under, "}"] if under else []),
            r"\endgroup",
            "",
        ]
    )


def _layout(shown: Texts) -> tuple[str, list[float], Sequence[Sequence[str]]]:
    """Choose the font, the part of the line of each column, and whether numbers may break."""
    for font, room in _ROOM.items():
        # A number with its spread, and its n, stay on one line.
        rows = [[_tight(text) for text in row] for row in shown.rows]
        wanted = _widths(shown.headers, rows, lambda text: [text])
        if sum(wanted) <= room:
            return font, [width / room for width in wanted], rows
    least = _widths(shown.headers, rows, _words)
    if sum(least) > room:
        rows = [list(row) for row in shown.rows]
        least = _widths(shown.headers, rows, _words)
    for most in range(max(wanted), 0, -1):
        widths = [max(low, min(w, most)) for low, w in zip(least, wanted, strict=True)]
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


def _tight(text: str) -> str:
    return re.sub("(?<=[±=]) | (?=[±=])", "\N{NO-BREAK SPACE}", text) if len(text) < 40 else text


def _cells(shown: Texts, row: int, texts: Sequence[str]) -> list[str]:
    cells = [
        rf"\textbf{{\boldmath {text}}}" if (row, column) in shown.bold else text
        for column, text in enumerate(map(escape_latex, texts))
    ]
    if marks := shown.marks[row]:
        cells[shown.n_left - 1] += rf"\textsuperscript{{{','.join(marks)}}}"
    return cells


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\[1.5pt]"


def _without_command(text: str) -> str:
    """Leave out the sentence that ends in a command: nobody runs one from a printed page."""
    said, command = part_command(text)
    return said[: said.rfind(". ") + 1] if command else text


def escape_latex(text: str) -> str:
    r"""Write text so that LaTeX shows it as it is, on one line; its long words may break.

    A character outside ASCII that has no plain command is written as its code point, as in
    `[U+4E2D]`: it always compiles, and nothing is lost.
    """
    pieces = re.split(f"([{_SUPERSCRIPTS}]+)", _breakable(_signed(outgoing(text))))
    return "".join(
        f"$^{{{piece.translate(_DIGITS)}}}$" if index % 2 else "".join(map(_letter, piece))
        for index, piece in enumerate(pieces)
    )


def _signed(text: str) -> str:
    """Set a minus, which is wider than a hyphen, before numbers, and a sign for a lone x."""
    text = re.sub(r"(?<=[\w)]) x (?=[\w(])", f" {TIMES} ", re.sub("[ \\t\\r\\n]+", " ", text))
    return re.sub(r"(?<![\w)-])-(?=[\d.∞])", "\N{MINUS SIGN}", text)


def _breakable(text: str) -> str:
    def broken(word: re.Match[str]) -> str:
        return _BREAKS.sub(lambda found: found[0] + "\N{ZERO WIDTH SPACE}", word[0])

    return _LONG_WORD.sub(broken, text)


def _letter(letter: str) -> str:
    if letter in _LATEX:
        return _LATEX[letter]
    return letter if " " <= letter <= "~" else f"{{[}}U+{ord(letter):04X}{{]}}"
