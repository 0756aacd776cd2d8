"""The report of one or more sweeps: tables, figures and the page that shows them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from rich.console import Console

from batchscape.analysis.cells import find_cells
from batchscape.analysis.comparison import compare
from batchscape.analysis.figures.comparison import comparison_charts
from batchscape.analysis.figures.loss import loss_chart
from batchscape.analysis.page.page import html_page
from batchscape.analysis.report.methods import methods
from batchscape.analysis.report.notes import find_notes, notes_on_horizons
from batchscape.analysis.report.page import page
from batchscape.analysis.report.sections import (
    Content,
    announce,
    begin_charts,
    in_short,
    make_folders,
    remove_stale,
    say,
    section_contents,
    write_contents,
)
from batchscape.analysis.report.table import Table
from batchscape.analysis.report.tables import comparison_figures, comparison_table
from batchscape.analysis.report.topic import Section
from batchscape.analysis.report.topics import Material, find_sections
from batchscape.analysis.report.writers import show
from batchscape.drawing import Drawing
from batchscape.errors import RecordError
from batchscape.record.figures import COLUMNS
from batchscape.record.folder import SweepFolder
from batchscape.record.noise_scale import NOISE_COLUMNS
from batchscape.record.tables import load
from batchscape.record.trials import refuse_trials
from batchscape.text import count_text

_MOST_ROWS = 20
"""Rows of the comparison in the terminal."""
_MOST_NOTES = 3
"""Notes in the terminal; the others are counted."""

READ = {
    "steps": ("optimizer_step", "samples", "tokens", "train_time_s", "loss", *NOISE_COLUMNS),
    "evals": tuple(COLUMNS["evals"]),
    "ranks": ("memory_method", "exchanges_every_micro_step"),
}
"""Columns that a report reads of the tables of its runs."""


@dataclass(frozen=True)
class Report:
    """A report that was written."""

    out: Path
    """Folder of the report."""
    comparison: pd.DataFrame
    """One row a cell, as `compare` returns it."""
    sections: tuple[Section, ...]
    """The answers, topic by topic."""
    notes: tuple[str, ...]
    """Runs that were left out, and limits of the numbers."""
    files: tuple[Path, ...]
    """Every file written, `report.md` first."""
    table: Table
    """Columns and rows of the comparison that are shown."""

    def render(self, console: Console) -> None:
        """Print the comparison, what it says in short and where the files are."""
        show(console, self.table, _MOST_ROWS)
        for note in self.notes[:_MOST_NOTES]:
            say(console, f"- {note}")
        answers = [f"{i}. {text}" for i, text in enumerate(in_short(self.sections), 1)]
        for text in ["", *answers] if answers else []:
            say(console, text)
        # One may weaken the answers of several topics.
        n_warnings = len({text for section in self.sections for text in section.warnings})
        n_notes = max(len(self.notes) - _MOST_NOTES, 0)
        contents = ["definitions", "tables", "figures"]
        contents += [count_text(n_warnings, "warning")] * (n_warnings > 0)
        contents += [count_text(n_notes, "more note")] * (n_notes > 0)
        say(console, f"\nReport: {self.files[0]} ({', '.join(contents)})", in_one_piece=True)
        say(console, f"Page: {self.out / 'report.html'}", in_one_piece=True)


def write_report(
    sweep_dirs: Sequence[Path],
    out: Path | None = None,
    *,
    targets: Sequence[float] | None = None,
    columns: Sequence[str] | None = None,
    with_charts: bool = True,
) -> Report:
    """Write the tables, figures and page of one or more sweeps.

    Parameters
    ----------
    sweep_dirs : sequence of Path
        Sweep folders; runs on different hardware are set side by side, never pooled.
    out : Path, optional
        Folder to write to; by default `report` in the first sweep folder. Files of an earlier
        report are replaced or removed, and no others.
    targets : sequence of float, optional
        Held-out losses to reach; by default chosen from what every global batch reached.
    columns : sequence of str, optional
        Figures that the comparison shows, in this order; by default all that were recorded.
    with_charts : bool
        Draw charts too, which takes most of the time.

    Raises
    ------
    ConfigError
        If a column is none of the comparison.
    RecordError
        If no folder is given, a folder holds no runs, or none of them can be read.
    AnalysisError
        If a target is no number, or was met before the training began.
    """
    if not sweep_dirs:
        raise RecordError("a report needs at least one sweep folder")
    comparison_figures(columns)
    out = SweepFolder(sweep_dirs[0]).report if out is None else out
    # Texts as objects: Arrow's are made for more rows than a table here has, and take longer.
    texts = pd.option_context("mode.string_storage", "python")
    with texts, Drawing() if with_charts else nullcontext() as drawing:
        return _write(sweep_dirs, out, targets, columns, drawing)


def _write(
    sweep_dirs: Sequence[Path],
    out: Path,
    targets: Sequence[float] | None,
    columns: Sequence[str] | None,
    drawing: Drawing | None,
) -> Report:
    refuse_trials(sweep_dirs)
    tables = load(*sweep_dirs, columns=READ)
    if tables.runs.empty:
        lines = [f"  {folder}: {reason}" for folder, reason in tables.damaged.items()]
        raise RecordError("\n".join(["no run folder could be read:", *lines]))
    cells = find_cells(tables.runs)
    comparison = compare(cells)
    material = Material(cells, tables, targets)
    table = comparison_table(comparison, cells, material.at_best, columns)
    loss = loss_chart(cells, tables, material.reaches, material.at_best)
    charts = list(comparison_charts(cells, comparison))
    if columns:  # comparison.csv may lack what they show
        charts = [replace(chart, tables=[]) for chart in charts]
    overview = Section(
        title="Comparison",
        tables=[table],
        pictures=[*([loss] if loss else []), *charts],
    )
    make_folders(out)
    all_sections: list[Section] = []
    for section in itertools.chain([overview], find_sections(material)):
        if drawing is not None:
            begin_charts(section, out, drawing)
        all_sections.append(section)
    sections = all_sections[1:]
    on_horizons = notes_on_horizons(len(cells.runs) - len(material.longest.runs))
    notes = [*on_horizons, *find_notes(cells, tables.damaged)]
    sentences = methods(cells, sections)
    sentences["Runs"] += on_horizons
    has_charts = drawing is not None
    text = page(
        cells,
        comparison=overview,
        sections=sections,
        notes=notes,
        methods=sentences,
        memory_methods=sorted(tables.ranks["memory_method"].dropna().unique()),
        with_charts=has_charts,
    )
    html = html_page(cells, comparison=overview, sections=sections, notes=notes, methods=sentences)
    contents: dict[str, Content] = {
        "report.md": text,
        "report.html": html,
        **section_contents(all_sections, methods=sentences, with_charts=has_charts),
        "tables/runs.csv": cells.runs,
    }
    announce(out, contents)
    write_contents(out, contents)
    if drawing is not None:
        drawing.finish()
    files = [*(out / name for name in contents), remove_stale(out, contents)]
    return Report(
        out=out,
        comparison=comparison,
        sections=tuple(sections),
        notes=tuple(notes),
        files=tuple(files),
        table=table,
    )
