"""What the report shows of decisions: the geometry to use, and the front."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.decisions.evidence import Basis, evidence_of
from batchscape.analysis.decisions.figures import pareto_chart
from batchscape.analysis.decisions.recommend import Needs, Recommendation, recommend
from batchscape.analysis.decisions.show import candidates_table
from batchscape.analysis.estimates import LEVEL, Estimate
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.report.table import Table
from batchscape.analysis.report.topic import Section
from batchscape.errors import AnalysisError
from batchscape.record.tables import Tables

_MAX_ROWS = 20
_MAX_GROUPS = 6
_DEFINITION = (
    "optimizer steps to the target x time of a step on the way there, of the geometry recommended"
)


def decision_section(
    cells: Cells, tables: Tables, reaches: pd.DataFrame | None = None
) -> Section | None:
    """Recommend a geometry for every group of comparable runs."""
    answer: list[str] = []
    warnings: list[str] = []
    views: list[Table] = []
    pictures: list[Chart] = []
    headlines: dict[str, Estimate] = {}
    open_: list[str] = []
    short: list[str] = []
    bases = evidence_of(cells, tables, reaches=reaches)
    if len(bases) > _MAX_GROUPS:
        command = ["batchscape", "recommend", *map(str, cells.runs["sweep_dir"].unique())]
        warnings.append(
            f"{len(bases)} groups of runs may not be compared with one another; the first "
            f"{_MAX_GROUPS} are shown. For all of them: {shlex.join(command)}"
        )
    for number, evidence in enumerate(bases[:_MAX_GROUPS]):
        try:
            recommendation = recommend(evidence, Needs())
        except AnalysisError as error:
            warnings.append(str(error))
            continue
        suffix = f"_{number}" if evidence.label else ""
        title = f": {evidence.label}" if evidence.label else ""
        label = f"{evidence.label}: " if evidence.label else ""
        answer += [f"{label}{recommendation.headline}", *recommendation.reasons]
        answer += recommendation.regret
        # The first screen has room for one group.
        short = short or [
            f"{label}{text}" for text in (recommendation.headline, *recommendation.costliest)
        ]
        # Where no time counts the headline says already how to have some.
        headline = recommendation.headline
        open_ += [
            f"{label}{line}"
            for line in recommendation.missing
            if line.partition(". ")[2] not in headline
        ]
        # The trade-off's own section says what its learning rates are worth.
        warnings += [text for text in recommendation.warnings if text not in evidence.warnings]
        if recommendation.geometry is None:
            continue
        name, title = f"time_to_target{suffix}", f"Geometries to choose from{title}"
        full = _full(recommendation, evidence)
        table = candidates_table(full, _MAX_ROWS, name, title)
        views += [table] if table.positions else []
        headlines |= {
            f"{name}{suffix}": replace(estimate, group=evidence.label)
            for name, estimate in _headlines(recommendation, evidence).items()
        }
        picture = pareto_chart(full, evidence.label, f"pareto{suffix}", f"time_to_target{suffix}")
        pictures += [] if picture is None else [picture]
    if not answer:
        return None
    title = "Which geometry to use"
    settle = list(dict.fromkeys(open_))
    return Section(title, answer, views, pictures, warnings, headlines, short, settle)


def _headlines(recommendation: Recommendation, evidence: Basis) -> dict[str, Estimate]:
    chosen = recommendation.chosen
    if evidence.reaches is None or chosen is None:
        return {}
    method = "logarithms of steps (over seeds) and step time (over runs) added, t-interval"
    quantities = {"time_to_target": ("time", "_s", "s"), "device_hours": ("device_hours", "", "h")}
    return {
        f"recommended_{name}": Estimate(
            float(chosen[f"{stem}{tail}"]),
            float(chosen[f"{stem}_low{tail}"]),
            float(chosen[f"{stem}_high{tail}"]),
            int(chosen["n_seeds"]),
            unit,
            method,
            _DEFINITION + ("" if unit == "s" else " x devices"),
            chosen["note"] or None,
        )
        for name, (stem, tail, unit) in quantities.items()
    }


def _full(recommendation: Recommendation, evidence: Basis) -> pd.DataFrame:
    """Name the runs of each cut that was timed beside those of the steps, which cuts share."""
    table = recommendation.candidates.rename(columns={"run_ids": "steps_from"})
    timed = evidence.table[evidence.table["step_time_s"].notna()]
    cuts = list(table[list(FACTORS)].itertuples(index=False, name=None))
    measured = table["source"].eq("measured")
    for name, column in (("run_ids", "run_id"), ("sweep_dirs", "sweep_dir")):
        of_cut = timed[column].astype(str).groupby([timed[factor] for factor in FACTORS])
        texts = of_cut.agg(lambda names: ";".join(sorted(set(names)))).to_dict()
        table[name] = pd.Series([texts.get(cut, "") for cut in cuts]).where(measured, "")
    table["recommended"] = (table[list(FACTORS)] == list(recommendation.geometry or ())).all(axis=1)
    return table.assign(level=LEVEL)
