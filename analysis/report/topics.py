"""Everything that a report says beside the comparison, topic by topic."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.claims.section import claims_section
from batchscape.analysis.comparing.section import comparing_section
from batchscape.analysis.cost.view import cost_section
from batchscape.analysis.decisions.view import decision_section
from batchscape.analysis.equivalence.section import equivalence_section
from batchscape.analysis.figures.style import paper_style
from batchscape.analysis.learning_rate.choice import at_best_learning_rate, tuning_warning
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


def find_sections(
    cells: Cells, tables: Tables, targets: Sequence[float] | None = None
) -> list[Section]:
    """Compute all sections.

    Parameters
    ----------
    cells : Cells
    tables : Tables
        What its runs were loaded from.
    targets : sequence of float, optional
        Held-out losses to reach; by default chosen from what every global batch reached.

    Returns
    -------
    list of Section
        In the order of the page, without those that the runs have nothing for.

    Raises
    ------
    AnalysisError
        If a target that was asked for cannot be one.
    """
    # Axes take their style when they are made.
    with paper_style():
        found = _sections(cells, tables, targets)
    return [section for section in found if section is not None]


def _sections(
    cells: Cells, tables: Tables, targets: Sequence[float] | None
) -> list[Section | None]:
    noise = cell_noise_scales(cells, tables.steps)
    reaches, notes = _reaches(cells, tables, targets)
    reached = [] if reaches is None else _convergence(cells, reaches, notes, noise)
    return [
        *reached,
        noise_scale_section(cells, tables.steps, noise),
        equivalence_section(cells, tables, reaches),
        cost_section(cells),
        decision_section(cells, tables, reaches),
        comparing_section(cells, reaches),
        claims_section(Evidence(cells, tables.steps, tables.evals, tables.ranks, reaches)),
    ]


def _reaches(
    cells: Cells, tables: Tables, targets: Sequence[float] | None
) -> tuple[pd.DataFrame | None, tuple[str, ...]]:
    """Find when the runs reached their targets; None where there is nothing to reach."""
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
    labels = {int(str(group)): str(label) for group, label in curve_groups(cells)["label"].items()}
    best = at_best_learning_rate(reaches)
    untuned = tuning_warning(reaches)
    schedules = cells.runs.reindex(columns=["schedule.name"])["schedule.name"].dropna().unique()
    return [
        tradeoff_section(
            best,
            groups=labels,
            noise_scales=_by_group(cells, noise),
            warnings=[] if untuned is None else [untuned],
        ),
        learning_rate_section(reaches, _finals(cells), labels),
        targets_section(best, groups=labels, notes=notes, schedules=list(schedules)),
    ]


def _by_group(cells: Cells, noise: pd.DataFrame) -> pd.DataFrame:
    groups = curve_groups(cells)["cells"].explode()
    group_of = {cell: group for group, cell in groups.items()}
    known = noise[noise["note"].isna() & noise["estimate"].notna()]
    return known.assign(
        group=known.index.map(group_of),
        global_batch_size=cells.table["global_batch_size"].reindex(known.index),
    )


def _finals(cells: Cells) -> pd.DataFrame:
    """Collect final losses of runs that saw equal samples."""
    groups = curve_groups(cells)["cells"].explode()
    group_of = {cell: group for group, cell in groups.items()}
    stopped = cells.runs.reindex(columns=["stop_reason"])["stop_reason"].eq("target")
    runs = cells.runs[cells.runs["cell"].isin(group_of) & ~stopped]
    names = ["global_batch_size", "learning_rate", "seed", "final_eval_loss", "status"]
    names += ["run_id", "trajectory_id"]
    return runs.reindex(columns=names).assign(group=runs["cell"].map(group_of))
