"""Everything that a report says beside the comparison, topic by topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.claims.section import claims_section
from batchscape.analysis.comparing.section import comparing_section
from batchscape.analysis.cost.frontier_view import frontier_section
from batchscape.analysis.cost.view import cost_section
from batchscape.analysis.decisions.view import decision_section
from batchscape.analysis.engines.section import engines_section
from batchscape.analysis.equivalence.section import equivalence_section
from batchscape.analysis.figures.style import paper_style
from batchscape.analysis.learning_rate.aim import final_losses
from batchscape.analysis.learning_rate.choice import (
    at_best_learning_rate,
    tuning_warning,
    with_cuts_of_programs,
)
from batchscape.analysis.learning_rate.view import learning_rate_section
from batchscape.analysis.noise_scale.estimate import cell_noise_scales
from batchscape.analysis.noise_scale.section import noise_scale_section
from batchscape.analysis.report.section import Section
from batchscape.analysis.targets.choice import choose_targets
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.analysis.targets.curves import curve_groups, curves_of
from batchscape.analysis.targets.section import targets_section
from batchscape.analysis.tradeoff.view import tradeoff_section
from batchscape.errors import AnalysisError
from batchscape.record.tables import Tables

__all__ = ["find_sections"]

_TOLD = ("completed", "diverged", "pruned")
"""Statuses of runs that have a result."""


def find_sections(
    cells: Cells, tables: Tables, targets: Sequence[float] | None = None
) -> Iterator[Section]:
    """Compute one section after the other.

    Parameters
    ----------
    tables : Tables
        What its runs were loaded from.
    targets : sequence of float, optional
        Held-out losses to reach; by default chosen from what every global batch reached.

    Yields
    ------
    Section
        In the order of the page, without those that the runs have nothing for.

    Raises
    ------
    AnalysisError
        If a target that was asked for cannot be one.
    """
    # Axes take their style when they are made.
    with paper_style():
        for section in _sections(cells, tables, targets):
            if section is not None:
                yield section


def _sections(
    cells: Cells, tables: Tables, targets: Sequence[float] | None
) -> Iterator[Section | None]:
    noise = cell_noise_scales(cells, tables.steps)
    reaches, notes = _reaches(cells, tables, targets)
    reached = [] if reaches is None else _convergence(cells, reaches, notes, noise)
    evidence = Evidence(cells, tables.steps, tables.evals, tables.ranks, reaches)
    yield from reached
    yield noise_scale_section(cells, tables.steps, noise)
    yield _section("Decompositions", lambda: equivalence_section(cells, tables, reaches))
    yield _section("Engines side by side", lambda: engines_section(cells, tables))
    yield _section("What a step costs", lambda: cost_section(cells))
    yield _section("Where memory ends", lambda: frontier_section(cells))
    yield _section("Which geometry to use", lambda: decision_section(cells, tables, reaches))
    yield _section("Side by side", lambda: comparing_section(cells, reaches))
    yield _section("Claims", lambda: claims_section(evidence))


def _section(title: str, make: Callable[[], Section | None]) -> Section | None:
    """Say why a topic has no answer, rather than leave the others out."""
    try:
        return make()
    except AnalysisError as error:
        return Section(title, ["Not identified."], warnings=[str(error)])


def _reaches(
    cells: Cells, tables: Tables, targets: Sequence[float] | None
) -> tuple[pd.DataFrame | None, tuple[str, ...]]:
    """Find when the runs reached their targets; None where there is nothing to reach."""
    if targets is None and not cells.runs["status"].isin(_TOLD).any():
        return None, ()
    try:
        curves = curves_of(cells, tables)
        if targets is not None:
            return steps_to_target(curves, targets), ()
        chosen = choose_targets(curves)
        return steps_to_target(curves), chosen.notes
    except AnalysisError:
        if targets is not None:
            raise
        return None, ()


def _convergence(
    cells: Cells, reaches: pd.DataFrame, notes: Sequence[str], noise: pd.DataFrame
) -> list[Section | None]:
    """Say how update frequency trades against convergence."""
    title = "Update frequency against convergence"
    try:
        return _converged(cells, reaches, notes, noise)
    except AnalysisError as error:
        return [Section(title, ["Not identified."], warnings=[str(error)])]


def _converged(
    cells: Cells, reaches: pd.DataFrame, notes: Sequence[str], noise: pd.DataFrame
) -> list[Section | None]:
    labels = {int(str(group)): str(label) for group, label in curve_groups(cells)["label"].items()}
    best = at_best_learning_rate(reaches)

    def tuning(group: int, target: float) -> str | None:
        return tuning_warning(
            reaches[(reaches["group"] == group) & (reaches["target_loss"] == target)]
        )

    schedules = cells.runs.reindex(columns=["schedule.name"])["schedule.name"].dropna().unique()
    return [
        tradeoff_section(
            best,
            groups=labels,
            noise_scales=_by_group(cells, noise),
            tuning=tuning,
        ),
        learning_rate_section(reaches, _finals(cells), labels),
        targets_section(
            with_cuts_of_programs(best, reaches),
            groups=labels,
            notes=notes,
            schedules=list(schedules),
        ),
    ]


def _by_group(cells: Cells, noise: pd.DataFrame) -> pd.DataFrame:
    groups = curve_groups(cells)["cells"].explode()
    group_of = {cell: group for group, cell in groups.items()}
    known = noise[noise["note"].isna() & noise["estimate"].notna()]
    return known.assign(
        cell=known.index,
        group=known.index.map(group_of),
        global_batch_size=cells.table["global_batch_size"].reindex(known.index),
    )


def _finals(cells: Cells) -> pd.DataFrame:
    """Collect final losses of runs that saw equal samples."""
    groups = curve_groups(cells)["cells"].explode()
    group_of = {cell: group for group, cell in groups.items()}
    runs = cells.runs[cells.runs["cell"].isin(group_of)]
    return final_losses(runs).assign(group=runs["cell"].map(group_of))
