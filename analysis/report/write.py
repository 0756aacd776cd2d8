"""The report of one or more sweeps: tables, figures and the page that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from rich.console import Console
from rich.markup import escape

from batchscape.analysis.cells import Cells, find_cells
from batchscape.analysis.comparison import compare
from batchscape.analysis.equivalence.decompositions import compare_decompositions
from batchscape.analysis.figures.bars import draw_memory, draw_step_time, draw_throughput
from batchscape.analysis.figures.curves import loss_curves
from batchscape.analysis.figures.loss import draw_loss
from batchscape.analysis.figures.style import looks, paper_style, save
from batchscape.analysis.noise_scale.estimate import cell_noise_scales, noise_scale_curves
from batchscape.analysis.noise_scale.view import (
    draw_noise_scale,
    noise_scale_grid,
    noise_scale_table,
)
from batchscape.analysis.report.grids import Grid, show
from batchscape.analysis.report.notes import find_notes
from batchscape.analysis.report.page import FIGURES, page
from batchscape.analysis.report.tables import comparison_grid, decomposition_grid, write_table
from batchscape.errors import RecordError
from batchscape.record.folder import SweepFolder
from batchscape.record.tables import Tables, load

__all__ = ["Report", "write_report"]

_TABLES = ("comparison", "decompositions", "noise_scale", "runs")


@dataclass(frozen=True)
class Report:
    """What was written, and what the terminal shows of it."""

    out: Path
    """Folder of the report."""
    comparison: pd.DataFrame
    """One row a cell, as `compare` returns it."""
    decompositions: pd.DataFrame
    """One row for each decomposition but the reference, as `compare_decompositions` returns it."""
    notes: tuple[str, ...]
    """What was left out, and what the numbers cannot carry."""
    files: tuple[Path, ...]
    """Every file written, `report.md` first."""
    grids: tuple[tuple[str, Grid], ...]
    """Titles and contents of the tables that the terminal shows."""

    def render(self, console: Console) -> None:
        """Print the tables, the notes and where the files are.

        Parameters
        ----------
        console : rich.console.Console
        """
        for title, grid in self.grids:
            show(console, grid, title)
        for note in self.notes:
            console.print(f"- {escape(note)}", highlight=False)
        figures = sum(file.suffix == ".png" for file in self.files)
        console.print(
            f"\nReport: {escape(str(self.files[0]))} (definitions, tables, and {figures} "
            "figures as PNG and PDF)",
            highlight=False,
            soft_wrap=True,
        )


def write_report(
    sweep_dirs: Sequence[Path], out: Path | None = None, *, figures: bool = True
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
    figures : bool
        Draw figures too, which takes most of the time.

    Returns
    -------
    Report

    Raises
    ------
    RecordError
        If no folder is given, a folder holds no runs, or none of them can be read.
    """
    if not sweep_dirs:
        msg = "a report needs at least one sweep folder"
        raise RecordError(msg)
    tables = load(*sweep_dirs)
    if tables.runs.empty:
        lines = [f"  {folder}: {reason}" for folder, reason in tables.damaged.items()]
        raise RecordError("\n".join(["no run folder could be read:", *lines]))
    out = SweepFolder(sweep_dirs[0]).report if out is None else out
    cells = find_cells(tables.runs)
    shown = _tables(cells, tables)
    notes = find_notes(cells, tables.damaged, tables.copies)
    _clear(out)
    files = [path for t in shown for path in write_table(out / "tables", t.name, t.table, t.grid)]
    files.append(out / "tables" / "runs.csv")
    cells.runs.to_csv(files[-1], index=False)
    drawn = _write_figures(cells, tables, out / "figures") if figures else {}
    grids = {t.name: t.grid for t in shown}
    text = page(
        cells,
        memory_methods=sorted(tables.ranks["memory_method"].dropna().unique()),
        comparison=grids["comparison"],
        decompositions=grids.get("decompositions"),
        noise_scale=grids.get("noise_scale"),
        notes=notes,
        figures=list(drawn),
    )
    (out / "report.md").write_text(text, encoding="utf-8")
    by_name = {t.name: t.table for t in shown}
    return Report(
        out=out,
        comparison=by_name["comparison"],
        decompositions=by_name.get("decompositions", pd.DataFrame()),
        notes=tuple(notes),
        files=(out / "report.md", *files, *(path for paths in drawn.values() for path in paths)),
        grids=tuple((t.title, t.grid) for t in shown),
    )


class _Shown(NamedTuple):
    """A table and what of it is shown."""

    title: str
    name: str
    table: pd.DataFrame
    grid: Grid


def _tables(cells: Cells, tables: Tables) -> list[_Shown]:
    comparison = compare(cells)
    shown = [
        _Shown("Comparison", "comparison", comparison, comparison_grid(comparison, cells)),
    ]
    decompositions = compare_decompositions(cells, tables.steps)
    if len(decompositions):
        grid = decomposition_grid(decompositions, cells)
        title = "Do decompositions train alike?"
        shown.append(_Shown(title, "decompositions", decompositions, grid))
    estimates = cell_noise_scales(cells, tables.steps)
    if len(estimates):
        table = noise_scale_table(cells, estimates)
        grid = noise_scale_grid(table, cells)
        shown.append(_Shown("Gradient noise scale", "noise_scale", table, grid))
    return shown


def _write_figures(cells: Cells, tables: Tables, folder: Path) -> dict[str, list[Path]]:
    """Draw what there is to draw; return the files by the name of the figure."""
    look = looks(cells)
    curves = loss_curves(cells, tables.steps, tables.evals, timed=False)
    timed = loss_curves(cells, tables.steps, tables.evals, timed=True)
    with paper_style():
        drawn = {
            "loss_vs_optimizer_steps": draw_loss(cells, curves, "optimizer_step", look),
            "loss_vs_samples": draw_loss(cells, curves, "samples", look),
            "loss_vs_time": draw_loss(cells, timed, "train_time_s", look),
            "memory": draw_memory(cells, look),
            "step_time": draw_step_time(cells, look),
            "throughput": draw_throughput(cells, look),
            "noise_scale": draw_noise_scale(cells, noise_scale_curves(cells, tables.steps), look),
        }
        return {
            name: save(figure, folder, name) for name, figure in drawn.items() if figure is not None
        }


def _clear(out: Path) -> None:
    """Remove the files of an earlier report: one that is not written again would be stale."""
    names = [f"tables/{name}.{end}" for name in _TABLES for end in ("csv", "md", "tex")]
    names += [f"figures/{name}.{end}" for name in FIGURES for end in ("png", "pdf")]
    for name in names:
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
