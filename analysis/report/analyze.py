"""`batchscape analyze`: targets, trade-off and learning rates of a table of anyone's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.text import Text

from batchscape.analysis.figures.style import paper_style
from batchscape.analysis.learning_rate.choice import at_best_learning_rate, tuning_warning
from batchscape.analysis.learning_rate.view import learning_rate_section
from batchscape.analysis.report.grids import escape_markdown
from batchscape.analysis.report.place import check_place
from batchscape.analysis.report.section import Section
from batchscape.analysis.report.sections import section_lines, show_section, write_sections
from batchscape.analysis.targets.choice import choose_targets
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.analysis.targets.foreign import ForeignTable, read_table
from batchscape.analysis.targets.section import targets_section
from batchscape.analysis.tradeoff.forms import Form
from batchscape.analysis.tradeoff.view import tradeoff_section
from batchscape.errors import AnalysisError

__all__ = ["Analysis", "analyze"]


@dataclass(frozen=True)
class Analysis:
    """What a table says."""

    source: Path
    reaches: pd.DataFrame
    """Steps to target, read or found; what everything else is computed from."""
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    """How the table was understood."""

    def render(self, console: Console) -> None:
        """Print answers, warnings and tables.

        Parameters
        ----------
        console : rich.console.Console
        """
        for note in self.notes:
            console.print(Text(f"{self.source.name}: {note}"), highlight=False)
        for section in self.sections:
            show_section(console, section, tables=True)

    def write(self, out: Path) -> list[Path]:
        """Write the page, tables, figures and LaTeX macros.

        Parameters
        ----------
        out : Path
            Folder to write to; it is made where it does not exist.

        Returns
        -------
        list of Path
            The files written, the page `analysis.md` first.

        Raises
        ------
        LaunchError
            If a link in the place of what is written leads out of the folder.
        """
        check_place(out, "analysis.md")
        for folder in (out / "tables", out / "figures"):
            folder.mkdir(parents=True, exist_ok=True)
        page, reaches = out / "analysis.md", out / "tables" / "reaches.csv"
        lines = [f"# {escape_markdown(self.source.name)}"]
        lines += [f"- {escape_markdown(note)}" for note in self.notes]
        lines += [line for section in self.sections for line in section_lines(section)]
        page.write_text("\n\n".join(line.strip("\n") for line in lines) + "\n", encoding="utf-8")
        self.reaches.to_csv(reaches, index=False)
        return [page, *write_sections(self.sections, out), reaches]


def analyze(
    path: Path,
    *,
    targets: Sequence[float] | None = None,
    form: Form = "two_term",
    overhead: float = 0.2,
    reference_batch_size: float | None = None,
    group: Sequence[str] = (),
    columns: Mapping[str, str] | None = None,
) -> Analysis:
    """Analyse a table of curves or of steps to target, whoever made it.

    Parameters
    ----------
    path : Path
        As for `read_table`.
    targets : sequence of float, optional
        Losses to reach; by default chosen from curves, or all of a table of steps to target.
    form, overhead, reference_batch_size
        As for `fit_tradeoff`.
    group, columns
        As for `read_table`.

    Returns
    -------
    Analysis

    Raises
    ------
    AnalysisError
        If the table is refused, or a target is not in it.
    """
    read = read_table(path, group=group, columns=columns)
    reaches, notes = _reaches(read, targets)
    best = at_best_learning_rate(reaches)
    warning = tuning_warning(reaches)
    with paper_style():
        sections = [
            targets_section(best, groups=read.groups, notes=notes, quantity="loss"),
            tradeoff_section(
                best,
                form=form,
                overhead=overhead,
                reference_batch_size=reference_batch_size,
                groups=read.groups,
                warnings=[] if warning is None else [warning],
            ),
            learning_rate_section(reaches, groups=read.groups),
        ]
    found = tuple(section for section in sections if section is not None)
    return Analysis(path, reaches, found, read.notes)


def _reaches(
    read: ForeignTable, targets: Sequence[float] | None
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    if read.kind == "curves":
        chosen = choose_targets(read.table) if targets is None else None
        notes = () if chosen is None else chosen.notes
        return steps_to_target(read.table, targets), notes
    if targets is None:
        return read.table, ()
    there = sorted(read.table["target_loss"].dropna().unique(), reverse=True)
    absent = [target for target in targets if target not in there]
    if absent:
        msg = (
            f"the table has steps to the targets {', '.join(f'{t:g}' for t in there) or 'unknown'},"
            f" and none to {absent[0]:g}; others need curves"
        )
        raise AnalysisError(msg)
    return read.table[read.table["target_loss"].isin(targets)].reset_index(drop=True), ()
