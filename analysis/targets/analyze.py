"""`batchscape analyze`: targets, trade-off and learning rates of a table of anyone's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.markup import escape

from batchscape.analysis.estimates import Estimate
from batchscape.analysis.figures.style import paper_style, save
from batchscape.analysis.learning_rate.choice import at_best_learning_rate, tuning_warning
from batchscape.analysis.learning_rate.view import learning_rate_section
from batchscape.analysis.report.grids import escape_markdown, show, to_markdown
from batchscape.analysis.report.macros import macros
from batchscape.analysis.report.section import Section
from batchscape.analysis.report.tables import write_table
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
            console.print(escape(f"{self.source.name}: {note}"), highlight=False)
        for section in self.sections:
            console.print(f"\n{escape(section.title)}", style="bold", highlight=False)
            for sentence in section.answer:
                console.print(escape(sentence), highlight=False)
            for warning in section.warnings:
                console.print(escape(f"! {warning}"), style="bold", highlight=False)
            for view in section.tables:
                console.print()
                show(console, view.grid, view.title)

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
        """
        for folder in (out / "tables", out / "figures"):
            folder.mkdir(parents=True, exist_ok=True)
        page = out / "analysis.md"
        files = [page]
        lines = [f"# {escape_markdown(self.source.name)}"]
        lines += [f"- {escape_markdown(note)}" for note in self.notes]
        headlines: dict[str, Estimate] = {}
        with paper_style():
            for section in self.sections:
                lines += [f"## {escape_markdown(section.title)}"]
                lines += [escape_markdown(sentence) for sentence in section.answer]
                lines += [f"**{escape_markdown(warning)}**" for warning in section.warnings]
                for view in section.tables:
                    lines += [f"### {escape_markdown(view.title)}", to_markdown(view.grid)]
                    files += write_table(out / "tables", view.name, view.table, view.grid)
                for picture in section.pictures:
                    lines.append(f"![{picture.name}](figures/{picture.name}.png)")
                    lines.append(escape_markdown(picture.caption))
                    files += save(picture.figure, out / "figures", picture.name)
                headlines |= section.headlines
        files += [out / "macros.tex", out / "tables" / "reaches.csv"]
        files[-2].write_text(macros(headlines), encoding="utf-8")
        self.reaches.to_csv(files[-1], index=False)
        page.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
        return files


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
