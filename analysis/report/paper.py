r"""`paper/`: two LaTeX documents of a report that compile as they are, and what they read.

`paper.tex` is what a paper shows, on three pages; it is written once, and its author's from then
on. `appendix.tex` has all else, and is made anew with every report, as the parts are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from itertools import groupby

from batchscape.analysis.cells import geometry_label
from batchscape.analysis.commands import split_command
from batchscape.analysis.estimates import Estimate
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.figures.style import COLUMN_IN
from batchscape.analysis.figures.vega import is_narrow, paper_caption
from batchscape.analysis.report.latex import escape_latex, to_latex
from batchscape.analysis.report.macros import FOLDER, TABLE, headline_rows, macros
from batchscape.analysis.report.table import MAX_ROWS, Table
from batchscape.analysis.report.topic import Section
from batchscape.text import list_text

_PICTURES = ("steps_to_target", "step_time", "memory", "loss")
"""Begins of the names of the charts that a paper shows, one of each."""
_MOST_COLUMNS = 10
_MOST_CUTS = 6
_MOST_HEADLINES = 16
_HEADLINES = (
    r"\caption{Headline numbers, with intervals and the number of units behind each. Each has "
    r"a command of its own in \texttt{macros.tex}.}"
)
_OF_APPENDIX = ("claim_", "memory_", "step_")
"""Begins of headline numbers that the appendix alone lists."""
_ANEW = "% Written anew by every report."


def paper_texts(
    sections: Sequence[Section],
    *,
    answers: Sequence[str],
    methods: Mapping[str, Sequence[str]],
    with_charts: bool,
) -> dict[str, str]:
    """Return all that the document reads but the charts, by file."""
    headlines = {name: value for section in sections for name, value in section.headlines.items()}
    tables = {table.name: table for section in sections for table in section.tables}
    charts = [chart for section in sections for chart in section.pictures if with_charts]
    warnings = [
        f"{of.title}: {warning}" for of in sections if of.headlines for warning in of.warnings
    ]
    paragraphs = [
        "\n".join([rf"\paragraph{{{escape_latex(title)}}}", *map(escape_latex, sentences)])
        for title, sentences in methods.items()
    ]
    comparison = ""
    if "comparison" in tables:
        comparison = to_latex(paper_comparison(tables["comparison"]), is_long=False)
    parts = {
        "methods.tex": paragraphs,
        "results.tex": _results(answers, headlines, charts, has_table=bool(comparison)),
        "everything.tex": _everything(sections, headlines, with_charts),
    }
    appendix = resources.files("batchscape.analysis.report").joinpath("appendix.tex")
    return {
        **{f"tables/{name}.tex": to_latex(table.shortened()) for name, table in tables.items()},
        "macros.tex": macros(headlines, warnings),
        "comparison.tex": comparison,
        **{name: "\n\n".join([_ANEW, *texts]) + "\n" for name, texts in parts.items()},
        "appendix.tex": appendix.read_text("utf-8"),
    }


def paper_comparison(table: Table) -> Table:
    """Choose rows and columns of the comparison for a page: each cut at its best rate."""
    n_completed = table.frame["n_completed"].tolist()
    rows = [row for row in table.lead or table.positions if n_completed[row]] or table.positions
    rows = rows[:MAX_ROWS]
    rows.sort(key=table.frame["global_batch_size"].tolist().__getitem__)
    narrow = replace(table, rows=rows, footnotes=(), notes=table.notes[:2])
    columns = [column for column in narrow.filled if column.name != "status"]
    left_out = [column.header for column in columns[_MOST_COLUMNS:]]
    notes = [*narrow.notes]
    if left_out:
        notes.append(f"Not shown: {', '.join(left_out)}.")
    cuts = geometry_label(table.frame).tolist()
    other_cuts = sorted(
        {cut for cut, n in zip(cuts, n_completed, strict=True) if n} - {cuts[r] for r in rows}
    )
    if other_cuts:
        notes.append(
            "In the appendix alone, as not trained at the best rate of their batch or for want of "
            f"room: {list_text(other_cuts, 'and', _MOST_CUTS)}."
        )
    return replace(narrow, columns=columns[:_MOST_COLUMNS], notes=notes)


def _without_command(sentence: str) -> str:
    """Leave out a command and the sentence that leads to it: a paper has no use for them."""
    before, command = split_command(sentence)
    if not command:
        return sentence
    sentences, full_stop, _ = before.rpartition(". ")
    return sentences + full_stop.strip()


def _results(
    answers: Sequence[str],
    headlines: Mapping[str, Estimate],
    charts: Sequence[Chart],
    *,
    has_table: bool,
) -> Iterator[str]:
    """Yield the answer, the comparison, the headline numbers and four figures."""
    sentences = map(_without_command, answers)
    yield "\n".join(escape_latex(text) for text in sentences if text) or "Nothing was found."
    # In one column and out of floats: these would each wait for a page of their own.
    yield "\\onecolumn\\raggedbottom"
    if has_table:
        yield (
            "{\\centering\n"
            "\\captionof{table}{What each cut of a global batch costs, at its best learning rate.}"
            "\\label{tab:comparison}\n"
            rf"\input{{\{FOLDER}/comparison}}" + "\\par}\\bigskip"
        )
    main = {name: value for name, value in headlines.items() if not name.startswith(_OF_APPENDIX)}
    if rows := headline_rows(main)[:_MOST_HEADLINES]:
        caption = r"\captionof{table}{Headline numbers, with intervals.}\label{tab:headlines}"
        yield "\n".join([r"{\centering", caption, *_tabular("tabular", rows), r"\par}\bigskip"])
    candidates = (next((c for c in charts if c.name.startswith(name)), None) for name in _PICTURES)
    for is_half, group in groupby(filter(None, candidates), is_narrow):
        width = f"{COLUMN_IN}in" if is_half else r"\textwidth"
        parts = [
            f"\\begin{{minipage}}[t]{{{width}}}\\centering\n{_graphics(picture)}\n"
            f"{_caption_of(picture)}\n\\end{{minipage}}"
            for picture in group
        ]
        yield "\\noindent\n" + "\\hfill\n".join(parts) + "\\par\\bigskip"


def _everything(
    sections: Sequence[Section], headlines: Mapping[str, Estimate], with_charts: bool
) -> Iterator[str]:
    """Yield topic by topic, the comparison first, every table and figure."""
    for place, section in enumerate(sections):
        pictures = section.pictures if with_charts else ()
        if section.tables or pictures:
            yield rf"\bsTopic{{{escape_latex(section.title)}}}"
        for table in section.tables:
            # One table needs no title beside the section's.
            title = table.title if len(section.tables) > 1 else section.title
            yield rf"\{TABLE}{{{table.name}}}{{{escape_latex(title)}.}}"
        rows = headline_rows(headlines)
        if place == 0 and rows:
            yield "\n".join(_tabular("longtable", rows, _HEADLINES + r"\\"))
        for picture in pictures:
            yield (
                f"\\begin{{center}}\n{_graphics(picture)}\n{_caption_of(picture)}\n\\end{{center}}"
            )


def _tabular(name: str, rows: Sequence[str], caption: str = "") -> list[str]:
    """Set rows of headline numbers."""
    wide = r">{\raggedright\arraybackslash}p{0.42\linewidth}"
    return [
        rf"{{\scriptsize\begin{{{name}}}{{@{{}}{wide}{wide}r@{{}}}}{caption}",
        r"\toprule what & estimate [interval] & n \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        rf"\end{{{name}}}}}",
    ]


def _graphics(picture: Chart) -> str:
    width = f"{COLUMN_IN}in" if is_narrow(picture) else r"\textwidth"
    size = rf"width={width},height=0.8\textheight,keepaspectratio"
    return rf"\includegraphics[{size}]{{\{FOLDER}/figures/{picture.name}}}"


def _caption_of(picture: Chart) -> str:
    caption = escape_latex(paper_caption(picture))
    return rf"\captionof{{figure}}{{{caption}}}\label{{fig:{picture.name}}}"
