r"""`paper/`: a LaTeX document of a report, which compiles as it is, and the parts that it reads.

The document itself is written once, and its author's from then on; the parts are made anew with
every report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

from batchscape.analysis.estimates import Estimate
from batchscape.analysis.figures.style import COLUMN_IN
from batchscape.analysis.report.grids import shorten
from batchscape.analysis.report.latex import escape_long, to_latex
from batchscape.analysis.report.macros import FOLDER, HEADLINES, macros
from batchscape.analysis.report.topic import Picture, Section, TableView
from batchscape.outgoing import outgoing

__all__ = ["DOCUMENT", "PARTS", "write_paper"]

DOCUMENT = "paper.tex"
PARTS = ("macros.tex", "methods.tex", "results.tex")
"""Texts that the document reads, beside tables and figures."""

_ANEW = "% Written anew by every report."


def write_paper(
    folder: Path,
    sections: Sequence[Section],
    *,
    said: Sequence[str],
    methods: Mapping[str, Sequence[str]],
    figures: bool,
) -> list[Path]:
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

    Returns
    -------
    list of Path
        The files of the document; it is the last.

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
            texts[f"tables/{view.name}.tex"] = to_latex(shorten(view.grid))
    for name, text in texts.items():
        (folder / name).write_text(outgoing(text), encoding="utf-8")
    document = folder / DOCUMENT
    if not document.exists():
        ours = resources.files("batchscape.analysis.report").joinpath(DOCUMENT)
        document.write_bytes(ours.read_bytes())
    return [*(folder / name for name in texts), document]


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
    """Yield the answer, every figure and, in one column, every table, with captions and labels."""
    yield "\n".join(escape_long(sentence) for sentence in said) or "Nothing was found."
    if headlines:
        yield _headlines()
    for section in sections:
        for picture in section.pictures if figures else ():
            yield _figure(picture)
    # Out of floats, since a table of several parts may be longer than a page.
    yield "\\onecolumn"
    for section in sections:
        for view in section.tables:
            yield _table(section, view)


def _headlines() -> str:
    return "\n".join(
        [
            r"\begin{table*}\centering",
            r"\caption{Headline numbers, with intervals and the number of units behind each. Each "
            r"has a command of its own in \texttt{macros.tex}.}\label{tab:headlines}\medskip",
            r"\scriptsize\begin{tabular}{@{}>{\raggedright}p{0.42\textwidth}"
            r">{\raggedright}p{0.42\textwidth}r@{}}",
            r"\toprule",
            r"what & estimate [interval] & n \\",
            r"\midrule",
            rf"\{HEADLINES}",
            r"\bottomrule",
            r"\end{tabular}\end{table*}",
        ]
    )


def _table(section: Section, view: TableView) -> str:
    # One table needs no title beside the section's.
    title = view.title if len(section.tables) > 1 else section.title
    return "\n".join(
        [
            r"\noindent\begin{minipage}{\textwidth}",
            rf"\captionof{{table}}{{{escape_long(title)}.}}\label{{tab:{view.name}}}",
            r"\end{minipage}\par\nopagebreak",
            rf"\input{{\{FOLDER}/tables/{view.name}}}\bigskip",
        ]
    )


def _figure(picture: Picture) -> str:
    narrow = picture.figure.get_figwidth() <= COLUMN_IN
    kind, width = ("figure", r"\columnwidth") if narrow else ("figure*", r"\textwidth")
    return "\n".join(
        [
            rf"\begin{{{kind}}}\centering\includegraphics[width={width},height=0.8\textheight,"
            rf"keepaspectratio]{{\{FOLDER}/figures/{picture.name}}}",
            rf"\caption{{{escape_long(picture.caption)}}}\label{{fig:{picture.name}}}"
            rf"\end{{{kind}}}",
        ]
    )
