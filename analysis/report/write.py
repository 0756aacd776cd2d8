"""The report of one or more sweeps: tables, figures and the page that shows them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.text import Text

from batchscape.analysis.cells import Cells, find_cells
from batchscape.analysis.commands import COMMAND
from batchscape.analysis.comparison import compare
from batchscape.analysis.figures.bars import (
    draw_memory,
    draw_processor_time,
    draw_step_time,
    draw_throughput,
)
from batchscape.analysis.figures.curves import loss_curves, with_room
from batchscape.analysis.figures.loss import MAX_PANELS, draw_loss
from batchscape.analysis.figures.rendering import Renderer
from batchscape.analysis.figures.style import looks, write_figure
from batchscape.analysis.report.grids import Grid, show
from batchscape.analysis.report.notes import find_notes
from batchscape.analysis.report.page import page
from batchscape.analysis.report.sections import (
    ENDINGS,
    check_place,
    show_section,
    write_sections,
)
from batchscape.analysis.report.tables import comparison_grid, write_csv, write_table
from batchscape.analysis.report.topic import Section, TableView
from batchscape.analysis.report.topics import find_sections
from batchscape.errors import RecordError
from batchscape.outgoing import visible
from batchscape.record.containment import refuse_links
from batchscape.record.folder import SweepFolder
from batchscape.record.index import INDEXED
from batchscape.record.tables import Tables, load

__all__ = ["Report", "write_report"]


_RUNS_A_PROCESS = 1000
"""Runs whose figures are worth the start of a process that renders them."""


@dataclass(frozen=True)
class Report:
    """What was written, and what the terminal shows of it."""

    out: Path
    """Folder of the report."""
    comparison: pd.DataFrame
    """One row a cell, as `compare` returns it."""
    sections: tuple[Section, ...]
    """What else the runs say, topic by topic."""
    notes: tuple[str, ...]
    """What was left out, and what the numbers cannot carry."""
    files: tuple[Path, ...]
    """Every file written, `report.md` first."""
    grid: Grid
    """What the terminal shows of the comparison."""

    @property
    def tables(self) -> dict[str, TableView]:
        """Tables of the sections, by name."""
        return {view.name: view for section in self.sections for view in section.tables}

    def render(self, console: Console) -> None:
        """Print the comparison, what each section answers, the notes and where the files are."""
        show(console, self.grid, "Comparison")
        for section in self.sections:
            show_section(console, section, tables=False)
        if self.sections and self.notes:
            console.print("\nLeft out, and to be kept in mind", style="bold")
        for note in self.notes:
            console.print(Text(f"- {note}"), highlight=False, soft_wrap=COMMAND in note)
        figures = sum(file.suffix == ".png" for file in self.files)
        console.print(
            Text(
                f"\nReport: {self.files[0]} (definitions, tables, and {figures} "
                "figures as PNG and PDF)"
            ),
            highlight=False,
            soft_wrap=True,
        )


def write_report(
    sweep_dirs: Sequence[Path],
    out: Path | None = None,
    *,
    targets: Sequence[float] | None = None,
    figures: bool = True,
) -> Report:
    """Write the tables, figures and page of one or more sweeps.

    Parameters
    ----------
    sweep_dirs : sequence of Path
        Sweep folders; runs on different hardware are set side by side, never pooled, and copies
        of a run count once.
    out : Path, optional
        Folder to write to; by default `report` in the first sweep folder. Files of an earlier
        report are replaced.
    targets : sequence of float, optional
        Held-out losses to reach; by default chosen from what every global batch reached.
    figures : bool
        Draw figures too, which takes most of the time.

    Raises
    ------
    RecordError
        If no folder is given, a folder holds no runs, or none of them can be read.
    AnalysisError
        If a target is no number, or was met before the training began.
    LaunchError
        If something in a sweep folder, or in the place of what is written, leads out of there.
    """
    if not sweep_dirs:
        msg = "a report needs at least one sweep folder"
        raise RecordError(msg)
    out = SweepFolder(sweep_dirs[0]).report if out is None else out
    for sweep_dir in sweep_dirs:
        refuse_links(SweepFolder(sweep_dir))
    check_place(out, "report.md")
    n_folders = sum(len(SweepFolder(sweep_dir).run_folders()) for sweep_dir in sweep_dirs)
    beside = figures and n_folders >= _RUNS_A_PROCESS and os.cpu_count() != 1
    # The process starts while the runs are loaded.
    with Renderer(beside=beside) as renderer:
        tables = _loaded(sweep_dirs)
        cells = find_cells(tables.runs)
        comparison = compare(cells)
        grid = comparison_grid(comparison, cells)
        drawn = _draw(cells, tables, renderer) if figures else {}
        sections, shown = [], []
        for section in find_sections(cells, tables, targets):
            sections.append(section)
            # Rendered beside the sections that follow.
            shown += [(p.name, renderer.submit(p.figure)) for p in section.pictures if figures]
        notes = find_notes(cells, tables.damaged, tables.copies)
        _clear(out)
        files = write_table(out / "tables", "comparison", comparison, grid)
        files.append(out / "tables" / "runs.csv")
        write_csv(files[-1], cells.runs)
        files += write_sections(sections, out, figures=False)
    for name, rendered in [*drawn.items(), *shown]:
        files += write_figure(rendered.result(), out / "figures", name)
    text = page(
        cells,
        memory_methods=sorted(tables.ranks["memory_method"].dropna().unique()),
        comparison=grid,
        sections=sections,
        notes=notes,
        figures=[name for name, rendered in drawn.items() if rendered.result()],
        drawn=figures,
    )
    (out / "report.md").write_text(visible(text), encoding="utf-8")
    return Report(
        out=out,
        comparison=comparison,
        sections=tuple(sections),
        notes=tuple(notes),
        files=(out / "report.md", *files),
        grid=grid,
    )


def _loaded(sweep_dirs: Sequence[Path]) -> Tables:
    tables = load(*sweep_dirs, columns=INDEXED)
    if tables.runs.empty:
        lines = [f"  {folder}: {reason}" for folder, reason in tables.damaged.items()]
        raise RecordError("\n".join(["no run folder could be read:", *lines]))
    return tables


def _draw(cells: Cells, tables: Tables, renderer: Renderer) -> dict[str, Future[dict[str, bytes]]]:
    """Have drawn what there is to draw of the comparison; return the contents by name."""
    look = looks(cells)
    shown = with_room(cells, MAX_PANELS, timed=False)
    curves = loss_curves(shown, tables.steps, tables.evals, timed=False)
    # What is drawn of the runs is in the curves.
    table = replace(cells, runs=cells.runs.iloc[:0])
    drawn = {
        "loss_vs_optimizer_steps": renderer.draw(draw_loss, table, curves, "optimizer_step", look),
        "loss_vs_samples": renderer.draw(draw_loss, table, curves, "samples", look),
    }
    shown = with_room(cells, MAX_PANELS, timed=True)
    timed = loss_curves(shown, tables.steps, tables.evals, timed=True)
    return {
        **drawn,
        "loss_vs_time": renderer.draw(draw_loss, table, timed, "train_time_s", look),
        "memory": renderer.draw(draw_memory, cells, look),
        "step_time": renderer.draw(draw_step_time, cells, look),
        "processor_time": renderer.draw(draw_processor_time, cells, look),
        "throughput": renderer.draw(draw_throughput, cells, look),
    }


def _clear(out: Path) -> None:
    """Remove the files of an earlier report: one that is not written again would be stale."""
    for folder, endings in ENDINGS.items():
        (out / folder).mkdir(parents=True, exist_ok=True)
        for path in (out / folder).iterdir():
            if path.suffix[1:] in endings:
                path.unlink()
    (out / "macros.tex").unlink(missing_ok=True)
