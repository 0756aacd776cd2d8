"""`report.md`: the answer first, and below it all that the report says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batchscape.analysis.cells import Cells, status_counts
from batchscape.analysis.figures.comparison import MAX_BARS
from batchscape.analysis.figures.vega import MAX_PANELS
from batchscape.analysis.report.sections import (
    FIRST_CHARTS,
    in_short,
    joined,
    method_lines,
    section_lines,
    sentence_markdown,
    title_and_questions,
)
from batchscape.analysis.report.topic import Section
from batchscape.analysis.report.writers import escape_markdown


def page(
    cells: Cells,
    *,
    comparison: Section,
    sections: Sequence[Section],
    notes: Sequence[str],
    methods: Mapping[str, Sequence[str]],
    memory_methods: Sequence[str],
    with_charts: bool,
) -> str:
    """Write the page in Markdown; paths are relative to its folder."""
    title, questions = title_and_questions(cells)
    lines = [f"# {escape_markdown(title)}"]
    lines += [f"> {escape_markdown(question)}" for question in questions]
    lines.append(_overview(cells))
    if answers := in_short(sections):
        lines.append(
            "\n".join(f"{i}. {sentence_markdown(text)}" for i, text in enumerate(answers, 1))
        )
    charts = {
        p.name for section in (comparison, *sections) for p in section.pictures if with_charts
    }
    if picture := next((name for name in FIRST_CHARTS if name in charts), None):
        lines.append(f"![{picture}](figures/{picture}.png)")
    lines.append("With charts, in a browser: [report.html](report.html).")
    if notes:
        lines.append("## Left out, and to be kept in mind")
        lines.append("\n".join(f"- {sentence_markdown(note)}" for note in notes))
    lines += section_lines(comparison, with_charts=with_charts)
    if comparison.pictures and with_charts:
        lines.append(
            f"Figures show {MAX_PANELS} panels or {MAX_BARS} cells at most, with the first of each "
            "choice of the page; the tables have all. Bars take cells that differ only in what "
            "decides neither memory nor time, such as the learning rate, for one. `paper/figures` "
            "has each figure as PDF."
        )
    if memory_methods:
        lines.append(f"Allocated memory was read from: {', '.join(memory_methods)}.")
    lines.append("Run by run: [runs.csv](tables/runs.csv).")
    for section in sections:
        lines += section_lines(section, with_charts=with_charts)
    return joined([*lines, *method_lines(methods)])


def _overview(cells: Cells) -> str:
    statuses = status_counts(cells.runs["status"])
    varying = ", ".join(f"`{name}`" for name in cells.key_settings)
    count = len(cells.dependent_settings())
    more = f", and {count} more along with them" if count else ""
    also = f" Beside the geometry, these settings vary: {varying}{more}." if varying else ""
    hardware = cells.runs["hardware"].dropna().unique()
    where = f" on {escape_markdown(str(hardware[0]))}" if len(hardware) == 1 else ""
    return f"{len(cells.runs)} runs in {len(cells.table)} cells{where}: {statuses}.{also}"
