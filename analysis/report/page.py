"""`report.md`, the answer on one page, and the texts in `details/` that lie behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from batchscape.analysis.best import SIGNIFICANCE
from batchscape.analysis.cells import Cells, counted
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.figures.bars import MAX_BARS
from batchscape.analysis.figures.curves import MAX_POINTS
from batchscape.analysis.figures.loss import MAX_MARKERS, MAX_PANELS
from batchscape.analysis.report.definitions import compared_cells
from batchscape.analysis.report.grids import Grid, escape_markdown, shorten, to_markdown
from batchscape.analysis.report.provenance import questions
from batchscape.analysis.report.sections import (
    file_name,
    in_short,
    section_lines,
    sentence_markdown,
    table_links,
)
from batchscape.analysis.report.topic import Picture, Section

__all__ = ["FIGURES", "MOST_NOTES", "details", "page"]

FIGURES: dict[str, str] = {
    "loss_vs_optimizer_steps": (
        "Loss against optimizer steps: mean over runs, shaded from the lowest to the highest run, "
        f"held-out loss as markers, {MAX_MARKERS} of a curve at most. Lines of decompositions that "
        "train alike lie on top of each other; a lower panel shows how far each is from the first "
        "one (largest difference over seeds, log scale), beside the spread between seeds."
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

MOST_NOTES = 3
"""Notes that page and terminal show; the others are counted and linked."""

_FIRST = ("tradeoff", "tradeoff_0", "pareto", "pareto_0", "loss_vs_samples")
"""Figures of which the page shows the first that there is."""
_ROWS = 6
"""Rows of the comparison on the page."""
_LEFT_OUT, _PROVENANCE = "left_out", "provenance"


def page(
    cells: Cells,
    *,
    comparison: Grid,
    sections: Sequence[Section],
    notes: Sequence[str],
    figures: Sequence[str],
) -> str:
    """Write the page: the answer first, and where all that lies behind it can be read.

    Parameters
    ----------
    comparison : Grid
        What `tables.comparison_grid` chose.
    sections : sequence of Section
        As `find_sections` returns them.
    notes : sequence of str
        As `find_notes` returns them.
    figures : sequence of str
        Names of all figures that were drawn.

    Returns
    -------
    str
        Markdown; paths are relative to the folder of the page.
    """
    names = list(dict.fromkeys(cells.runs["sweep_name"].astype(str)))
    lines = [f"# {escape_markdown(' and '.join(names))}"]
    lines += [f"> {escape_markdown(question)}" for question in questions(names)]
    lines.append(_overview(cells))
    if said := in_short(sections):
        lines.append("\n".join(f"{i}. {sentence_markdown(text)}" for i, text in enumerate(said, 1)))
    if picture := next((name for name in _FIRST if name in figures), None):
        lines.append(f"![{picture}](figures/{picture}.png)")
    shown = shorten(comparison, _ROWS)
    more = len(comparison.rows) - len(shown.rows)
    # The first note of a shortened table says which rows it has.
    rule = shown.notes[:1] if more else []
    lines += ["## Comparison", to_markdown(replace(shown, notes=[*rule, *_signs(shown, cells)]))]
    lines.append(
        f"{'All rows, definitions' if more else 'Definitions'} and figures: "
        "[comparison](details/comparison.md). Run by run: [runs.csv](tables/runs.csv). "
        "With charts, in a browser: [report.html](report.html)."
    )
    lines += ["## More", "\n".join(_topics(sections, len(notes)))]
    lines += [f"- {sentence_markdown(note)}" for note in notes[:MOST_NOTES]]
    return _text(lines)


def details(
    *,
    memory_methods: Sequence[str],
    comparison: Grid,
    sections: Sequence[Section],
    notes: Sequence[str],
    pictures: Sequence[Picture],
    drawn: bool,
    provenance: Mapping[str, Grid],
) -> dict[str, str]:
    """Write what lies behind the page, a text a topic.

    Parameters
    ----------
    memory_methods : sequence of str
        Where figures of allocated memory come from, as the ranks recorded it.
    comparison, sections, notes
        As for `page`.
    pictures : sequence of Picture
        Those of the comparison.
    drawn : bool
        Whether the pictures of the sections were drawn too.
    provenance : mapping of str to Grid
        As `provenance.provenance` returns it.

    Returns
    -------
    dict of str to str
        Markdown by file name without its ending; paths are relative to the folder `details`.
    """
    lines = ["# Comparison", to_markdown(shorten(comparison))]
    links = table_links("comparison", "../")
    lines.append(f"Files: {links}. Run by run: [runs.csv](../tables/runs.csv).")
    if memory_methods:
        lines.append(f"Allocated memory was read from: {', '.join(memory_methods)}.")
    if pictures:
        lines += [f"![{p.name}](../figures/{p.name}.png)\n\n{p.caption}" for p in pictures]
        lines.append(
            f"Figures show {MAX_PANELS} settings or {MAX_BARS} cells at most; the tables have all. "
            "Bars take cells that differ only in what decides neither memory nor time, such as the "
            "learning rate, for one. "
            f"Curves of more than {MAX_POINTS} optimizer steps, or fewer where a figure has many, "
            "are averaged over windows of equal length. `paper/figures` has each figure as PDF."
        )
    found = {"comparison": lines}
    for section in sections:
        found[file_name(section)] = section_lines(section, figures=drawn, above="../")
    found[_LEFT_OUT] = [
        "# Left out, and to be kept in mind",
        "\n".join(f"- {sentence_markdown(note)}" for note in notes) or "Nothing.",
    ]
    found[_PROVENANCE] = ["# Provenance"]
    for title, grid in provenance.items():
        found[_PROVENANCE] += [f"## {title}", to_markdown(grid)]
    return {name: _text(own) for name, own in found.items()}


def _text(lines: Sequence[str]) -> str:
    return "\n\n".join(line.strip("\n") for line in lines) + "\n"


def _topics(sections: Sequence[Section], notes: int) -> Iterator[str]:
    """Link every topic, with how often it warns."""
    for section in sections:
        count = len(section.warnings)
        warned = f" **({count} warning{'s' if count > 1 else ''})**" if count else ""
        title = escape_markdown(section.title)
        yield f"- [{title}](details/{file_name(section)}.md){warned}"
    yield f"- [Settings, machines and software](details/{_PROVENANCE}.md)"
    if notes:
        said = "all shown here" if notes <= MOST_NOTES else f"{MOST_NOTES} of {notes} shown here"
        yield f"- [Left out, and to be kept in mind](details/{_LEFT_OUT}.md) ({said}):"


def _signs(grid: Grid, cells: Cells) -> list[str]:
    """Say in short what the signs in a table mean; the definitions are in the details."""
    signs = []
    if any("±" in text for row in grid.rows for text in row):
        signs.append(
            f"±: half-width of the {LEVEL:.0%} t-interval over completed runs, of losses over seeds"
        )
    if grid.bold:
        signs.append(
            f"bold: best in its column among {compared_cells(cells)}, step times at one global "
            f"batch size, and told from each of them (p < {SIGNIFICANCE:g} after Holm's adjustment)"
        )
    return [f"{'; '.join(signs)}."] if signs else []


def _overview(cells: Cells) -> str:
    shown = counted(cells.runs["status"])
    varying = ", ".join(f"`{name}`" for name in cells.shown)
    more = f", and {count} more along with them" if (count := len(cells.unshown())) else ""
    also = f" Beside the geometry, these settings vary: {varying}{more}." if varying else ""
    hardware = cells.runs["hardware"].dropna().unique()
    where = f" on {escape_markdown(str(hardware[0]))}" if len(hardware) == 1 else ""
    return f"{len(cells.runs)} runs in {len(cells.table)} cells{where}: {shown}.{also}"
