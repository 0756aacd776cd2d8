"""The topics of a report, in the order of its page, and the material they are computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import pandas as pd

from batchscape.analysis.branches.topic import branches_section
from batchscape.analysis.cells import Cells, launched_batches, status_counts
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.claims.topic import claims_section
from batchscape.analysis.comparing.topic import comparing_section
from batchscape.analysis.cost.frontier_topic import frontier_section
from batchscape.analysis.cost.memory_model import MemoryModel
from batchscape.analysis.cost.predicted import predicted_section
from batchscape.analysis.cost.topic import cost_section, memory_models
from batchscape.analysis.decisions.topic import decision_section
from batchscape.analysis.engines.topic import engines_section
from batchscape.analysis.equivalence.topic import equivalence_section
from batchscape.analysis.failures.topic import failures_section
from batchscape.analysis.horizons.runs import runs_by_horizon, without_shorter_horizons
from batchscape.analysis.horizons.topic import horizons_section
from batchscape.analysis.joins import column_of
from batchscape.analysis.learning_rate.aim import STEPS, final_losses, is_varied
from batchscape.analysis.learning_rate.choice import (
    at_best_learning_rate,
    cells_at_best,
    tuning_warning,
    with_cuts_of_programs,
)
from batchscape.analysis.learning_rate.optimum import best_learning_rates
from batchscape.analysis.learning_rate.topic import learning_rate_section
from batchscape.analysis.noise_scale.estimate import cell_noise_scales
from batchscape.analysis.noise_scale.topic import noise_scale_section
from batchscape.analysis.report.topic import Section
from batchscape.analysis.search.topic import search_section
from batchscape.analysis.targets.choice import choose_targets
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.analysis.targets.curves import curve_groups, curves_of
from batchscape.analysis.targets.topic import targets_section
from batchscape.analysis.tradeoff.topic import tradeoff_section
from batchscape.errors import AnalysisError
from batchscape.record.status import Status
from batchscape.record.tables import Tables

_WITH_RESULT = [str(status) for status in Status if status.is_sealed]
"""Statuses of runs that have a result."""


@dataclass(frozen=True)
class Material:
    """Tables that several topics are computed from, each computed once."""

    cells: Cells
    tables: Tables
    targets: Sequence[float] | None = None
    """Held-out losses to reach; by default chosen from the losses that every global batch
    reached."""

    @cached_property
    def longest(self) -> Cells:
        """The cells without shorter horizons, which have a topic of their own."""
        return without_shorter_horizons(self.cells, self.by_horizon[0])

    @cached_property
    def by_horizon(self) -> tuple[pd.DataFrame, dict[int, str]]:
        """The runs that end with their budget, by horizon, and labels of their groups."""
        return runs_by_horizon(self.cells)

    @cached_property
    def memory(self) -> dict[int, MemoryModel]:
        """The memory models of the cells, by group of equal cost."""
        return memory_models(self.cells)

    @cached_property
    def noise(self) -> pd.DataFrame:
        """The noise scales of the cells."""
        return cell_noise_scales(self.longest, self.tables.steps)

    @cached_property
    def reaches_and_notes(self) -> tuple[pd.DataFrame | None, tuple[str, ...]]:
        """Steps to the targets (None: there is nothing to reach), and how these were chosen."""
        if self.targets is None and not self.cells.runs["status"].isin(_WITH_RESULT).any():
            return None, ()
        try:
            curves = curves_of(self.longest, self.tables)
            if self.targets is not None:
                return steps_to_target(curves, self.targets), ()
            chosen = choose_targets(curves, groups=self.labels)
            return steps_to_target(curves, chosen), chosen.notes
        except AnalysisError:
            if self.targets is not None:
                raise
            return None, ()

    @property
    def reaches(self) -> pd.DataFrame | None:
        """Steps to the targets."""
        return self.reaches_and_notes[0]

    @cached_property
    def best(self) -> pd.DataFrame | None:
        """Steps to the targets at the best learning rate of each global batch."""
        if self.reaches is None:
            return None
        return at_best_learning_rate(self.reaches, optima=self.optima)

    @cached_property
    def optima(self) -> pd.DataFrame | None:
        """The best learning rate of each global batch and target; None where none was varied."""
        if self.reaches is None or not is_varied(self.reaches):
            return None
        return best_learning_rates(self.reaches[self.reaches["learning_rate"].notna()], STEPS)

    @cached_property
    def finals(self) -> pd.DataFrame:
        """The final losses, with `group` and `cell`."""
        runs, group_of = self.longest.runs, self.group_of
        runs = runs[runs["cell"].isin(group_of)]
        return final_losses(runs).assign(group=runs["cell"].map(group_of), cell=runs["cell"])

    @cached_property
    def at_best(self) -> dict[int, float]:
        """The best learning rate of each cell that stands for its global batch."""
        with suppress(AnalysisError):
            if self.reaches is not None:
                return cells_at_best(self.reaches, self.finals, self.optima)
        return {}

    @cached_property
    def groups(self) -> pd.DataFrame:
        """Groups of cells that must not be pooled at one target."""
        return curve_groups(self.longest)

    @property
    def labels(self) -> dict[int, str]:
        """Labels of these groups, by number."""
        return {int(str(group)): str(label) for group, label in self.groups["label"].items()}

    @property
    def group_of(self) -> dict[int, int]:
        """The group of each cell that was started."""
        return {cell: int(str(g)) for g, cells in self.groups["cells"].items() for cell in cells}


def find_sections(material: Material) -> Iterator[Section]:
    """Compute the sections in the order of the page; a topic that cannot answer says why."""
    # Targets of the user are refused here, not topic by topic.
    _ = material.reaches_and_notes
    for title, compute in TOPICS.items():
        try:
            section = compute(material)
        except AnalysisError as error:
            section = Section(title, ["Not identified."], warnings=[str(error)])
        if section is not None:
            yield section


def _none_completed(cells: Cells) -> Section | None:
    """Say first that there is nothing to compare, where that is so."""
    statuses = cells.runs["status"]
    if statuses.eq("completed").any():
        return None
    sentence = f"No run has completed ({status_counts(statuses)}), so there is nothing to compare."
    return Section("Completed runs", [sentence])


def _tradeoff(material: Material) -> Section | None:
    reaches, best = material.reaches, material.best
    if reaches is None or best is None:
        return None

    def tuning(group: int, target: float) -> str | None:
        def here(table: pd.DataFrame) -> pd.DataFrame:
            return table[(table["group"] == group) & (table["target_loss"] == target)]

        optima = material.optima
        return tuning_warning(here(reaches), None if optima is None else here(optima))

    identified = material.noise[material.noise["note"].isna() & material.noise["estimate"].notna()]
    noise_scales = identified.assign(
        cell=identified.index,
        group=identified.index.map(material.group_of),
        global_batch_size=material.cells.table["global_batch_size"].reindex(identified.index),
    )
    return tradeoff_section(
        best,
        groups=material.labels,
        noise_scales=noise_scales,
        tuning=tuning,
    )


def _targets(material: Material) -> Section | None:
    (reaches, notes), best = material.reaches_and_notes, material.best
    if reaches is None or best is None:
        return None
    schedules = column_of(material.cells.runs, "schedule.name")
    section = targets_section(
        with_cuts_of_programs(best, reaches),
        groups=material.labels,
        notes=notes,
        schedules=list(schedules.dropna().unique()),
    )
    keys = ["sweep_dir", "run_id", "target_loss"]
    is_best = pd.MultiIndex.from_frame(reaches[keys]).isin(pd.MultiIndex.from_frame(best[keys]))
    return section and replace(section, chart_data={"reaches": reaches.assign(is_best=is_best)})


TOPICS: Mapping[str, Callable[[Material], Section | None]] = {
    "Completed runs": lambda m: _none_completed(m.cells),
    "Search": lambda m: search_section(m.cells),
    "Which geometry to use": lambda m: decision_section(
        m.longest, m.tables, m.reaches, m.memory if m.longest is m.cells else None
    ),
    "Update frequency against convergence": _tradeoff,
    "Batches that grow on the way": lambda m: branches_section(m.cells, m.tables.steps),
    "Claims": lambda m: claims_section(
        Evidence(m.longest, m.tables.steps, m.tables.evals, m.tables.ranks, m.reaches)
    ),
    "Decompositions": lambda m: equivalence_section(m.longest, m.tables, m.reaches),
    "What a step costs": lambda m: cost_section(m.cells, m.memory),
    "Where memory ends": lambda m: frontier_section(m.cells),
    "Predicted against measured": lambda m: predicted_section(m.cells),
    "Learning rate": lambda m: (
        None
        if m.reaches is None
        else learning_rate_section(
            m.reaches, m.finals, m.labels, launched_batches(m.longest.runs), m.optima
        )
    ),
    "Batch and rate together": lambda m: horizons_section(*m.by_horizon),
    "Targets": _targets,
    "Gradient noise scale": lambda m: noise_scale_section(
        m.longest, m.tables.steps, m.noise, m.at_best
    ),
    "Engines side by side": lambda m: engines_section(m.longest, m.tables),
    "Side by side": lambda m: comparing_section(m.longest, m.reaches),
    "Failures and retries": lambda m: failures_section(m.cells.runs, m.tables.attempts),
}
"""All topics in the order of the page, by the title of a section that cannot answer.

Each is None where the runs have nothing for it.
"""
