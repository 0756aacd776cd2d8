"""`batchscape analyze`: targets, trade-off, learning rates and losses of a user's own table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console

from batchscape.analysis.estimates import LEVEL, half_widths
from batchscape.analysis.horizons.topic import horizons_section
from batchscape.analysis.learning_rate.choice import (
    at_best_learning_rate,
    tied_warning,
    tuning_warning,
)
from batchscape.analysis.learning_rate.topic import learning_rate_section
from batchscape.analysis.report.methods import interval_methods
from batchscape.analysis.report.sections import (
    Content,
    begin_charts,
    joined,
    make_folders,
    method_lines,
    say,
    section_contents,
    section_lines,
    show_section,
    write_contents,
)
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.analysis.report.writers import escape_markdown
from batchscape.analysis.targets.choice import choose_targets
from batchscape.analysis.targets.crossings import Crossing, steps_to_target
from batchscape.analysis.targets.foreign import (
    DEFAULT_OPTIONS,
    ForeignTable,
    ReadOptions,
    as_table,
    pooled_groups,
    read_file,
)
from batchscape.analysis.targets.tidy import distinct_trajectories
from batchscape.analysis.targets.topic import targets_section
from batchscape.analysis.tradeoff.forms import Form
from batchscape.analysis.tradeoff.topic import tradeoff_section
from batchscape.drawing import Drawing
from batchscape.errors import AnalysisError

_HORIZON = "samples"
"""Groups by this column are horizons of one training."""
_SAME_LENGTH = 1.02
"""Ratio of lengths below which a last, partial batch explains the difference: ours."""
_LOSS = "final_eval_loss"


@dataclass(frozen=True)
class Analysis:
    """The answers to a user's table."""

    source: Path
    runs: pd.DataFrame
    """One row a run: the steps to each target, or the final loss. All else is computed from it."""
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    """How the columns of the table were read."""

    def render(self, console: Console) -> None:
        """Print answers, warnings and tables."""
        for note in self.notes:
            say(console, f"{self.source.name}: {note}")
        for section in self.sections:
            show_section(console, section)

    def write(self, out: Path) -> list[Path]:
        """Write the page, tables, figures and the paper made of them.

        Parameters
        ----------
        out : Path
            Folder to write to; it is made where it does not exist.

        Returns
        -------
        list of Path
            The files written, the page `analysis.md` first.
        """
        make_folders(out)
        name = "reaches" if "steps_to_target" in self.runs else "runs"
        methods = {"Data": [f"Read from {self.source.name}.", *self.notes]}
        if intervals := [*interval_methods(self.sections)]:
            methods["Intervals"] = intervals
        lines = [f"# {escape_markdown(self.source.name)}"]
        lines += [f"- {escape_markdown(note)}" for note in self.notes]
        lines += [line for section in self.sections for line in section_lines(section)]
        contents: dict[str, Content] = {
            "analysis.md": joined([*lines, *method_lines(methods)]),
            **section_contents(self.sections, methods=methods),
            f"tables/{name}.csv": self.runs,
        }
        with Drawing() as drawing:
            for section in self.sections:
                begin_charts(section, out, drawing)
            write_contents(out, contents)
            drawing.finish()
        return [out / name for name in contents]


def analyze(
    path: Path,
    options: ReadOptions = DEFAULT_OPTIONS,
    *,
    targets: Sequence[float] | None = None,
    form: Form | None = None,
    overhead: float = 0.2,
    reference_batch_size: float | None = None,
    crossing: Crossing = "sustained",
) -> Analysis:
    """Analyse a table of curves, of steps to target or of final losses, whoever made it.

    Parameters
    ----------
    path, options
        As for `read_table`.
    targets : sequence of float, optional
        Losses to reach; by default chosen from curves, or all of a table of steps to target.
    form, overhead, reference_batch_size
        As for `fit_tradeoff`.
    crossing : str
        As for `steps_to_target`; of curves.

    Raises
    ------
    AnalysisError
        If the table is refused, a target is not in it, or an option needs another kind of table.
    """
    table = read_file(path)
    read = as_table(table, options)
    _refuse_unfit(read, targets, crossing)
    sections: Sequence[Section | None]
    if read.kind == "final losses":
        runs = read.table
        warnings = [_unequal_lengths(runs), tied_warning(runs, "final_eval_loss")]
        by_horizon = _HORIZON in options.group
        numbers, labels = pooled_groups(table, options, across=_HORIZON)
        pooled = runs.assign(
            group=runs["group"].map(numbers), horizon=runs[_HORIZON] if by_horizon else math.inf
        )
        sections = [
            learning_rate_section(pd.DataFrame(), runs, groups=read.groups, quantity="loss"),
            horizons_section(pooled, labels),
            _final_losses(runs, read.groups),
        ]
        first, *rest = filter(None, sections)
        all_warnings = [*filter(None, warnings), *first.warnings]
        sections = [replace(first, warnings=all_warnings), *rest]
    else:
        runs, notes = _reaches(read, targets, crossing)
        best = at_best_learning_rate(runs)
        warnings = [tuning_warning(runs), tied_warning(runs, "steps_to_target")]
        sections = [
            targets_section(best, groups=read.groups, notes=notes, quantity="loss"),
            tradeoff_section(
                best,
                form=form,
                overhead=overhead,
                reference_batch_size=reference_batch_size,
                groups=read.groups,
                warnings=[*filter(None, warnings)],
            ),
            learning_rate_section(runs, groups=read.groups, quantity="loss"),
        ]
    return Analysis(path, runs, tuple(filter(None, sections)), read.notes)


def _refuse_unfit(read: ForeignTable, targets: Sequence[float] | None, crossing: Crossing) -> None:
    """Refuse what a table of this kind cannot answer."""
    if targets is not None and read.kind == "final losses":
        raise AnalysisError(
            "the table has one loss a run, and steps to a target need curves: leave --target out"
        )
    if crossing != "sustained" and read.kind != "curves":
        raise AnalysisError(
            f"--crossing={crossing} says when a loss curve reaches a target, and the table is one "
            f"of {read.kind}: leave --crossing out"
        )


def _unequal_lengths(runs: pd.DataFrame) -> str | None:
    """Warn where trainings of unequal length have their final losses compared."""
    if "samples" not in runs:
        return (
            "how many samples each run saw is not in the table: final losses compare at equal ones"
        )
    spans = runs.groupby("group")["samples"].agg(["min", "max"])
    unequal = spans[spans["max"] > spans["min"] * _SAME_LENGTH]
    if unequal.empty:
        return None
    low, high = unequal["min"].min(), unequal["max"].max()
    return (
        f"runs ended after {low:g} to {high:g} samples: a loss after more of them is lower, "
        "whatever the batch or learning rate. Compare at equal samples, or at a target with "
        "--minimise steps"
    )


def _reaches(
    read: ForeignTable, targets: Sequence[float] | None, crossing: Crossing
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    if read.kind == "curves":
        if targets is not None:
            return steps_to_target(read.table, targets, crossing=crossing), ()
        chosen = choose_targets(read.table, groups=read.groups)
        return steps_to_target(read.table, chosen, crossing=crossing), chosen.notes
    if targets is None:
        return read.table, ()
    recorded = sorted(read.table["target_loss"].dropna().unique(), reverse=True)
    absent = [target for target in targets if target not in recorded]
    if absent:
        texts = ", ".join(f"{target:g}" for target in recorded)
        raise AnalysisError(
            f"the table has the steps to {texts or 'one target, which it does not name'}, and to "
            f"no other; given {absent[0]:g}; a table of loss curves has those to any target"
        )
    return read.table[read.table["target_loss"].isin(targets)].reset_index(drop=True), ()


def _final_losses(runs: pd.DataFrame, groups: Mapping[int, str]) -> Section:
    """Show mean and spread of the final losses, and how many runs diverged (their loss is inf)."""
    runs = distinct_trajectories(runs)
    has_rates = "learning_rate" in runs
    keys = ["group", "global_batch_size", "learning_rate"]
    parts = runs.assign(
        loss=runs[_LOSS].where(np.isfinite(runs[_LOSS])), is_inf=np.isinf(runs[_LOSS])
    ).groupby([name for name in keys if name in runs], dropna=False)
    table = parts.agg(
        n=("is_inf", "size"),
        diverged=("is_inf", "sum"),
        finite=("loss", "count"),
        mean=("loss", "mean"),
        sd=("loss", "std"),
    ).reset_index()
    table["ci95"] = half_widths(table["sd"], table["finite"])
    return Section(
        "Final losses",
        [f"Of {len(runs)} runs {table['diverged'].sum()} diverged."],
        [
            Table(
                "final_losses",
                "Final losses",
                table,
                [
                    *([Column("group", words=groups, is_left=True)] if len(groups) > 1 else []),
                    Column("global_batch_size", "global batch", format="g", is_left=True),
                    *([Column("learning_rate", format=3, is_left=True)] if has_rates else []),
                    Column("n", "runs"),
                    Column("mean", spread="ci95", n="finite", usual="n"),
                    Column("sd", format=2),
                    Column("diverged"),
                ],
                notes=[
                    f"Means ± half-widths of {LEVEL:.0%} t-intervals, and standard deviations, "
                    "over the runs that did not diverge."
                ],
            )
        ],
    )
