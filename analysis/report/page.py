"""`report.md`: the answer first, and below it all that the report says."""

from __future__ import annotations

from collections.abc import Sequence

from batchscape.analysis.cells import Cells, counted
from batchscape.analysis.figures.bars import MAX_BARS
from batchscape.analysis.figures.curves import MAX_POINTS
from batchscape.analysis.figures.loss import MAX_MARKERS, MAX_PANELS
from batchscape.analysis.report.provenance import questions
from batchscape.analysis.report.sections import in_short, section_lines, sentence_markdown
from batchscape.analysis.report.table import Table
from batchscape.analysis.report.topic import Section
from batchscape.analysis.report.writers import escape_markdown, to_markdown
from batchscape.text import list_text

__all__ = ["FIGURES", "page"]

FIGURES: dict[str, str] = {
    "loss_vs_optimizer_steps": (
        "Loss against optimizer steps: mean over runs, shaded from the lowest to the highest run, "
        f"held-out loss as markers, {MAX_MARKERS} of a curve at most. Lines of decompositions that "
        "train alike lie on top of each other; a lower panel shows how far each is from the first "
        "one (largest difference over seeds, log scale), beside the spread between seeds."
    ),
    "loss_vs_samples": (
        "Loss against training samples: mean over runs, shaded from the lowest to the highest run, "
        "held-out loss as markers."
    ),
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

_FIRST = ("tradeoff", "tradeoff_0", "pareto", "pareto_0", "loss_vs_samples")
"""Figures of which the first that there is stands beside the answer."""


def page(
    cells: Cells,
    *,
    comparison: Section,
    sections: Sequence[Section],
    notes: Sequence[str],
    provenance: Sequence[Table],
    memory_methods: Sequence[str],
    figures: bool,
) -> str:
    """Write the page.

    Parameters
    ----------
    comparison : Section
        The comparison of the cells, with its pictures.
    sections : sequence of Section
        As `find_sections` returns them.
    notes : sequence of str
        As `find_notes` returns them.
    provenance : sequence of Table
        As `provenance.provenance` returns it.
    memory_methods : sequence of str
        Where figures of allocated memory come from, as the ranks recorded it.
    figures : bool
        Whether the pictures were drawn.

    Returns
    -------
    str
        Markdown; paths are relative to the folder of the page.
    """
    names = list(dict.fromkeys(cells.runs["sweep_name"].astype(str)))
    lines = [f"# {escape_markdown(list_text(names, 'and'))}"]
    lines += [f"> {escape_markdown(question)}" for question in questions(names)]
    lines.append(_overview(cells))
    if said := in_short(sections):
        lines.append("\n".join(f"{i}. {sentence_markdown(text)}" for i, text in enumerate(said, 1)))
    drawn = {p.name for section in (comparison, *sections) for p in section.pictures if figures}
    if picture := next((name for name in _FIRST if name in drawn), None):
        lines.append(f"![{picture}](figures/{picture}.png)")
    lines.append("With charts, in a browser: [report.html](report.html).")
    if notes:
        lines.append("## Left out, and to be kept in mind")
        lines.append("\n".join(f"- {sentence_markdown(note)}" for note in notes))
    lines += section_lines(comparison, figures=figures)
    if comparison.pictures:
        lines.append(
            f"Figures show {MAX_PANELS} settings or {MAX_BARS} cells at most; the tables have all. "
            "Bars take cells that differ only in what decides neither memory nor time, such as the "
            "learning rate, for one. "
            f"Curves of more than {MAX_POINTS} optimizer steps, or fewer where a figure has many, "
            "are averaged over windows of equal length. `paper/figures` has each figure as PDF."
        )
    if memory_methods:
        lines.append(f"Allocated memory was read from: {', '.join(memory_methods)}.")
    lines.append("Run by run: [runs.csv](tables/runs.csv).")
    for section in sections:
        lines += section_lines(section, figures=figures)
    lines.append("## Provenance")
    for table in provenance:
        lines += [f"### {table.title}", to_markdown(table)]
    return "\n\n".join(line.strip("\n") for line in lines) + "\n"


def _overview(cells: Cells) -> str:
    shown = counted(cells.runs["status"])
    varying = ", ".join(f"`{name}`" for name in cells.shown)
    more = f", and {count} more along with them" if (count := len(cells.unshown())) else ""
    also = f" Beside the geometry, these settings vary: {varying}{more}." if varying else ""
    hardware = cells.runs["hardware"].dropna().unique()
    where = f" on {escape_markdown(str(hardware[0]))}" if len(hardware) == 1 else ""
    return f"{len(cells.runs)} runs in {len(cells.table)} cells{where}: {shown}.{also}"
