"""What the report shows of decisions: the geometry to use, and the front."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.cost.memory_model import MemoryModel
from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.decisions.evidence import Basis, bases_of
from batchscape.analysis.decisions.figures import pareto_chart
from batchscape.analysis.decisions.recommend import Needs, Recommendation, recommend
from batchscape.analysis.decisions.show import candidates_table
from batchscape.analysis.estimates import LEVEL, Estimate
from batchscape.analysis.report.topic import Section, join_sections
from batchscape.errors import AnalysisError
from batchscape.record.tables import Tables

_TITLE = "Which geometry to use"
_MAX_ROWS = 20
_MAX_GROUPS = 6
_DEFINITION = (
    "optimizer steps to the target x time of a step on the way there, of the geometry recommended"
)


def decision_section(
    cells: Cells,
    tables: Tables,
    reaches: pd.DataFrame | None = None,
    models: Mapping[int, MemoryModel] | None = None,
) -> Section | None:
    """Recommend a geometry for every group of comparable runs; `models` as for `bases_of`."""
    bases = bases_of(cells, tables, reaches=reaches, models=models)
    parts = [_section_of(*number_and_basis) for number_and_basis in enumerate(bases[:_MAX_GROUPS])]
    if len(bases) > _MAX_GROUPS:
        command = ["batchscape", "recommend", *map(str, cells.runs["sweep_dir"].unique())]
        warning = (
            f"{len(bases)} groups of runs may not be compared with one another; the first "
            f"{_MAX_GROUPS} are shown. For all of them: {shlex.join(command)}"
        )
        parts = [Section(_TITLE, warnings=[warning]), *parts]
    section = join_sections(_TITLE, parts)
    return section if section.answer else None


def _section_of(number: int, basis: Basis) -> Section:
    """Recommend a geometry for one group of comparable runs."""
    try:
        recommendation = recommend(basis, Needs())
    except AnalysisError as error:
        return Section(_TITLE, warnings=[str(error)])
    label, suffix, of_group = "", "", ""
    if basis.label:
        label, suffix, of_group = f"{basis.label}: ", f"_{number}", f": {basis.label}"
    headline = recommendation.headline
    section = Section(
        _TITLE,
        [f"{label}{headline}", *recommendation.reasons, *recommendation.regret],
        # The trade-off's own section says what its learning rates are worth.
        warnings=[text for text in recommendation.warnings if text not in basis.warnings],
        first_screen=[f"{label}{text}" for text in (headline, *recommendation.costliest)],
        # Where no time counts the headline says already how to have some.
        settling_runs=[
            f"{label}{line}"
            for line in recommendation.missing
            if line.partition(". ")[2] not in headline
        ],
    )
    if recommendation.chosen is None:
        return section
    named_candidates = _with_run_names(recommendation, basis)
    title = f"Geometries to choose from{of_group}"
    table = candidates_table(named_candidates, _MAX_ROWS, f"time_to_target{suffix}", title)
    picture = pareto_chart(named_candidates, basis.label, f"pareto{suffix}", table.name)
    return replace(
        section,
        tables=[table] if table.positions else [],
        pictures=[] if picture is None else [picture],
        headlines=_headlines(recommendation.chosen, basis, suffix)
        if recommendation.is_recommended and basis.reaches is not None
        else {},
    )


def _headlines(chosen: pd.Series[Any], basis: Basis, suffix: str) -> dict[str, Estimate]:
    method = "logarithms of steps (over seeds) and step time (over runs) added, t-interval"
    quantities = {"time_to_target": ("time{}_s", "s"), "device_hours": ("device_hours{}", "h")}
    return {
        f"recommended_{name}{suffix}": Estimate(
            float(chosen[column.format("")]),
            float(chosen[column.format("_low")]),
            float(chosen[column.format("_high")]),
            int(chosen["n_seeds"]),
            unit,
            method,
            _DEFINITION + ("" if unit == "s" else " x devices"),
            group=basis.label,
        )
        for name, (column, unit) in quantities.items()
    }


def _with_run_names(recommendation: Recommendation, basis: Basis) -> pd.DataFrame:
    """Name the runs of each cut that was timed beside those of the steps, which cuts share."""
    timed = basis.table[basis.table["step_time_s"].notna()]
    names = timed.groupby(list(FACTORS))[["run_id", "sweep_dir"]].agg(_joined)
    names.columns = pd.Index(["run_ids", "sweep_dirs"])
    table = recommendation.candidates.rename(columns={"run_ids": "steps_from"})
    table = table.join(names, on=list(FACTORS))
    measured = table["source"].eq("measured")
    table[names.columns] = table[names.columns].where(measured, "").fillna("")
    is_chosen = (table[list(FACTORS)] == list(recommendation.geometry or ())).all(axis=1)
    return table.assign(recommended=is_chosen & recommendation.is_recommended, level=LEVEL)


def _joined(names: pd.Series[Any]) -> str:
    return ";".join(sorted(set(map(str, names))))
