r"""`paper/`: a LaTeX document of a report, which compiles as it is, and the parts that it reads.

The document itself is written once, and its author's from then on; the parts are made anew with
every report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path

from batchscape.analysis.estimates import Estimate
from batchscape.analysis.figures.style import COLUMN_IN
from batchscape.analysis.report.grids import printed
from batchscape.analysis.report.latex import escape_long, to_latex
from batchscape.analysis.report.macros import CAPTION, FOLDER, TABLE, headline_rows, macros
from batchscape.analysis.report.topic import Picture, Section, TableView
from batchscape.outgoing import outgoing
from batchscape.record.files import write_atomically

__all__ = ["DOCUMENT", "PARTS", "write_paper"]

DOCUMENT = "paper.tex"
PARTS = ("macros.tex", "methods.tex", "results.tex")
"""Texts that the document reads, beside tables and figures."""

_ROWS = 25
"""Headline numbers of one tabular, which take two lines at most: what half a page holds."""
_ANEW = "% Written anew by every report."


def write_paper(
    folder: Path,
    sections: Sequence[Section],
    *,
    said: Sequence[str],
    methods: Mapping[str, Sequence[str]],
    figures: bool,
) -> None:
    """Write the document if there is none, and all that it reads but the figures.

    Parameters
    ----------
    folder : Path
        Where to, with `tables` in it.
    sections : sequence of Section
        What tables, captions and headline numbers are taken from.
    said : sequence of str
        Sentences that the results begin with.
    methods : mapping of str to sequence of str
        As `methods.methods` returns it.
    figures : bool
        Whether the pictures of the sections lie in `figures`.

    Raises
    ------
    AnalysisError
        As `macros` raises it.
    """
    headlines = {name: value for of in sections for name, value in of.headlines.items()}
    texts = {
        "macros.tex": macros(headlines),
        "methods.tex": "\n\n".join([_ANEW, *_paragraphs(methods)]) + "\n",
        "results.tex": "\n\n".join([_ANEW, *_results(sections, said, headlines, figures)]) + "\n",
    }
    for section in sections:
        for view in section.tables:
            texts[f"tables/{view.name}.tex"] = to_latex(printed(view.grid))
    for name, text in texts.items():
        (folder / name).write_text(outgoing(text), encoding="utf-8")
    document = folder / DOCUMENT
    if not document.exists():
        ours = resources.files("batchscape.analysis.report").joinpath(DOCUMENT)
        # Half of it would be taken for its author's.
        write_atomically(document, ours.read_bytes())


def _paragraphs(methods: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for title, sentences in methods.items():
        lines = "\n".join(escape_long(sentence) for sentence in sentences)
        yield f"\\paragraph{{{escape_long(title)}}}\n{lines}"


def _results(
    sections: Sequence[Section],
    said: Sequence[str],
    headlines: Mapping[str, Estimate],
    figures: bool,
) -> Iterator[str]:
    """Yield the answer, and topic by topic, the comparison first, every table and figure."""
    yield "\n".join(escape_long(sentence) for sentence in said) or "Nothing was found."
    # In one column and out of floats: a table of several parts may be longer than a page, and
    # floats without text between them fill a page each.
    yield "\\onecolumn\\raggedbottom"
    for place, section in enumerate(sections):
        for view in section.tables:
            yield _table(section, view)
        if place == 0 and headlines:
            yield _headlines(headlines)
        pictures = section.pictures if figures else ()
        for is_narrow, alike in groupby(pictures, _is_narrow):
            shown = [
                _figure(picture, r"0.48\textwidth" if is_narrow else r"\textwidth")
                for picture in alike
            ]
            yield "\\noindent\n" + "\\hfill\n".join(shown) + "\\par\\bigskip"


def _headlines(headlines: Mapping[str, Estimate]) -> str:
    unknown = [name for name, estimate in headlines.items() if not estimate.is_identified]
    names = ", ".join(name.replace("_", " ") for name in unknown)
    left_out = f"Not identified, and in no table: {names}." if unknown else ""
    if len(unknown) == len(headlines):
        return rf"\noindent {escape_long(left_out)}\par\bigskip"
    caption = (
        "Headline numbers, with intervals and the number of units behind each. Each has a command "
        rf"of its own in \texttt{{macros.tex}}. {escape_long(left_out)}"
    )
    lines = [rf"\{CAPTION}{{headlines}}{{{caption.strip()}}}", r"{\scriptsize"]
    rows = headline_rows(headlines)
    for start in range(0, len(rows), _ROWS):
        lines += [
            r"\noindent\begin{tabular}{@{}>{\raggedright}p{0.42\textwidth}"
            r">{\raggedright}p{0.42\textwidth}r@{}}",
            r"\toprule",
            r"what & estimate [interval] & n \\",
            r"\midrule",
            *rows[start : start + _ROWS],
            r"\bottomrule",
            r"\end{tabular}\par\medskip",
        ]
    return "\n".join([*lines, r"}\medskip"])


def _table(section: Section, view: TableView) -> str:
    # One table needs no title beside the section's.
    title = view.title if len(section.tables) > 1 else section.title
    return rf"\{TABLE}{{{view.name}}}{{{escape_long(title)}.}}"


def _is_narrow(picture: Picture) -> bool:
    return picture.figure.get_figwidth() <= COLUMN_IN


def _figure(picture: Picture, width: str) -> str:
    return "\n".join(
        [
            rf"\begin{{minipage}}[t]{{{width}}}\centering",
            rf"\includegraphics[width=\textwidth,height=0.8\textheight,keepaspectratio]"
            rf"{{\{FOLDER}/figures/{picture.name}}}",
            rf"\captionof{{figure}}{{{escape_long(picture.caption)}}}\label{{fig:{picture.name}}}",
            r"\end{minipage}",
        ]
    )
