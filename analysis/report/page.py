"""`report.md`: one page that a reader understands alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from batchscape.analysis.cells import Cells
from batchscape.analysis.figures.bars import MAX_BARS
from batchscape.analysis.figures.curves import MAX_POINTS
from batchscape.analysis.figures.loss import MAX_PANELS
from batchscape.analysis.report.grids import Grid, escape_markdown, shorten, to_markdown
from batchscape.analysis.report.provenance import questions
from batchscape.analysis.report.sections import section_lines
from batchscape.analysis.report.topic import Section

__all__ = ["FIGURES", "page"]

FIGURES: dict[str, str] = {
    "loss_vs_optimizer_steps": (
        "Loss against optimizer steps: mean over runs, shaded from the lowest to the highest run, "
        "held-out loss as markers. Lines of decompositions that train alike lie on top "
        "of each other; a lower panel shows how far each is from the first one (largest "
        "difference over seeds, log scale), beside the spread between seeds."
    ),
    "loss_vs_samples": "Loss against training samples, drawn in the same way.",
    "loss_vs_time": (
        "Loss against the time in optimizer steps (evaluation, checkpoints and start-up excluded), "
        "mean over runs; only runs whose times are valid."
    ),
    "memory": (
        "Allocated memory by phase of a run, maximum over ranks: bars are means, points are runs."
    ),
    "step_time": (
        "Median time of an optimizer step by phase: bars are means over runs, points are whole "
        "step times of runs. Medians of parts need not add up to the median of the whole."
    ),
    "processor_time": (
        "Disturbed, and no step time: processor time of rank 0 in an optimizer step, of cells of "
        "which no time counts. Bars are means over runs, points are runs."
    ),
    "throughput": "Throughput over all devices: bars are means, points are runs.",
}
"""Figures by file name, with their captions."""


def page(
    cells: Cells,
    *,
    memory_methods: Sequence[str],
    comparison: Grid,
    sections: Sequence[Section],
    notes: Sequence[str],
    figures: Sequence[str],
    drawn: bool,
    provenance: Mapping[str, Grid],
) -> str:
    """Write the page.

    Parameters
    ----------
    memory_methods : sequence of str
        Where figures of allocated memory come from, as the ranks recorded it.
    comparison : Grid
        What `tables.comparison_grid` chose.
    sections : sequence of Section
        As `find_sections` returns them.
    notes : sequence of str
        As `find_notes` returns them.
    figures : sequence of str
        Names of the figures of the comparison that were drawn, keys of `FIGURES`.
    drawn : bool
        Whether the pictures of the sections were drawn too.
    provenance : mapping of str to Grid
        As `provenance.provenance` returns it.

    Returns
    -------
    str
        Markdown; paths are relative to the folder of the page.
    """
    names = list(dict.fromkeys(cells.runs["sweep_name"].astype(str)))
    lines = [f"# {escape_markdown(' and '.join(names))}"]
    lines += [f"> {escape_markdown(question)}" for question in questions(names)]
    lines.append(_overview(cells))
    lines += _in_short(sections)
    files = ", ".join(f"[{end}](tables/comparison.{end})" for end in ("csv", "md", "tex"))
    lines += ["## Comparison", to_markdown(shorten(comparison))]
    lines.append(f"Files: {files}. Run by run: [runs.csv](tables/runs.csv).")
    if memory_methods:
        lines.append(f"Allocated memory was read from: {', '.join(memory_methods)}.")
    if figures:
        lines += [f"![{name}](figures/{name}.png)\n\n{FIGURES[name]}" for name in figures]
        lines.append(
            f"Figures show {MAX_PANELS} settings or {MAX_BARS} cells at most; the tables have all. "
            f"Curves of more than {MAX_POINTS} optimizer steps, or fewer where a figure has many, "
            "are averaged over windows of equal length. Every figure is also there as PDF."
        )
    lines += [line for section in sections for line in section_lines(section, figures=drawn)]
    lines.append("## Left out, and to be kept in mind")
    lines.append("\n".join(f"- {escape_markdown(note)}" for note in notes) or "Nothing.")
    for title, grid in provenance.items():
        lines += [f"## {title}", to_markdown(grid)]
    return "\n\n".join(line.strip("\n") for line in lines) + "\n"


def _in_short(sections: Sequence[Section]) -> list[str]:
    """Give the first sentence of every answer, and how often it was warned."""
    items = []
    for section in sections:
        if not section.answer:
            continue
        count = len(section.warnings)
        warned = f" **({count} warning{'s' if count > 1 else ''} below)**" if count else ""
        title = escape_markdown(section.title)
        items.append(f"- *{title}*: {escape_markdown(section.answer[0])}{warned}")
    return ["## In short", "\n".join(items)] if items else []


def _overview(cells: Cells) -> str:
    counts = cells.runs["status"].value_counts()
    shown = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    varying = ", ".join(f"`{name}`" for name in cells.settings)
    also = f" Beside the geometry, these settings vary: {varying}." if varying else ""
    return f"{len(cells.runs)} runs in {len(cells.table)} cells: {shown}.{also}"
