"""What the report shows of decisions: the geometry to use, the front, the break-even batch."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.decisions.break_even import break_even_batch
from batchscape.analysis.decisions.evidence import Basis, evidence_of
from batchscape.analysis.decisions.figures import pareto_chart
from batchscape.analysis.decisions.recommend import Needs, Recommendation, recommend
from batchscape.analysis.decisions.show import (
    candidates_table,
    held_against,
)
from batchscape.analysis.estimates import LEVEL, Estimate
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.report.table import Table
from batchscape.analysis.report.topic import Section
from batchscape.errors import AnalysisError
from batchscape.record.tables import Tables

__all__ = ["decision_section"]

_MAX_ROWS = 20
_MAX_GROUPS = 6
_DEFINITION = (
    "optimizer steps to the target x time of a step on the way there, of the geometry recommended"
)


def decision_section(
    cells: Cells, tables: Tables, reaches: pd.DataFrame | None = None
) -> Section | None:
    """Recommend a geometry for every group of comparable runs.

    Parameters
    ----------
    tables : Tables
        What its runs were loaded from.
    reaches : DataFrame, optional
        As `steps_to_target` returns it for these runs, where it was computed before.

    Returns
    -------
    Section or None
        None where no run was completed. Where no geometry has a time, it recommends none, and says
        what is known.
    """
    answer: list[str] = []
    warnings: list[str] = []
    views: list[Table] = []
    pictures: list[Chart] = []
    headlines: dict[str, Estimate] = {}
    open_: list[str] = []
    short: list[str] = []
    everything = evidence_of(cells, tables, reaches=reaches)
    if len(everything) > _MAX_GROUPS:
        command = ["batchscape", "recommend", *map(str, cells.runs["sweep_dir"].unique())]
        warnings.append(
            f"{len(everything)} groups of runs may not be compared with one another; the first "
            f"{_MAX_GROUPS} are shown. For all of them: {shlex.join(command)}"
        )
    for number, evidence in enumerate(everything[:_MAX_GROUPS]):
        try:
            found = recommend(evidence, Needs())
        except AnalysisError as error:
            warnings.append(str(error))
            continue
        suffix = f"_{number}" if evidence.label else ""
        title = f": {evidence.label}" if evidence.label else ""
        label = f"{evidence.label}: " if evidence.label else ""
        answer += [f"{label}{found.headline}", *found.reasons, *held_against(found.candidates)]
        answer += found.regret
        # The first screen has room for one group.
        short = short or [f"{label}{text}" for text in (found.headline, *found.costliest)]
        # Where no time counts the headline says already how to have some.
        said = found.headline
        open_ += [f"{label}{line}" for line in found.missing if line.partition(". ")[2] not in said]
        # The trade-off's own section says what its learning rates are worth.
        warnings += [text for text in found.warnings if text not in evidence.warnings]
        if found.geometry is None:
            continue
        name, title = f"time_to_target{suffix}", f"Geometries to choose from{title}"
        table = candidates_table(_full(found, evidence), _MAX_ROWS, name, title)
        views += [table] if table.positions else []
        even = dict(_break_even(found, evidence))
        answer += _break_even_answer(even)
        own = {f"break_even_batch_{growth}": e for growth, e in even.items()}
        own |= _headlines(found, evidence)
        headlines |= {f"{n}{suffix}": replace(e, group=evidence.label) for n, e in own.items()}
        full = _full(found, evidence)
        picture = pareto_chart(full, evidence.label, f"pareto{suffix}", f"time_to_target{suffix}")
        pictures += [] if picture is None else [picture]
    if not answer:
        return None
    title = "Which geometry to use"
    settle = list(dict.fromkeys(open_))
    return Section(title, answer, views, pictures, warnings, headlines, short, settle)


def _break_even(found: Recommendation, evidence: Basis) -> Iterable[tuple[str, Estimate]]:
    model = evidence.step_time
    if model is None or evidence.tradeoff is None or found.geometry is None:
        return
    devices, micro, _ = found.geometry
    yield (
        "accumulation",
        break_even_batch(evidence.tradeoff, model, devices=devices, micro_batch_size=micro),
    )
    yield "micro", break_even_batch(evidence.tradeoff, model, devices=devices, growth="micro")


def _break_even_answer(found: Mapping[str, Estimate]) -> Iterable[str]:
    notes = {estimate.note for estimate in found.values() if not estimate.is_identified}
    if len(notes) == 1 and not any(estimate.is_identified for estimate in found.values()):
        yield f"Break-even global batch: {notes.pop()}."
        return
    growing = {"accumulation": "more accumulation", "micro": "a larger micro-batch"}
    for growth, estimate in found.items():
        value = f"{estimate.text()} samples" if estimate.is_identified else estimate.note
        yield f"Break-even global batch, made by {growing[growth]}: {value}."


def _headlines(found: Recommendation, evidence: Basis) -> dict[str, Estimate]:
    chosen = found.chosen
    if evidence.reaches is None or chosen is None:
        return {}
    method = "logarithms of steps (over seeds) and step time (over runs) added, t-interval"
    named = {"time_to_target": ("time", "_s", "s"), "device_hours": ("device_hours", "", "h")}
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
        for name, (stem, tail, unit) in named.items()
    }


def _full(found: Recommendation, evidence: Basis) -> pd.DataFrame:
    """Name the runs of each cut that was timed beside those of the steps, which cuts share."""
    table = found.candidates.rename(columns={"run_ids": "steps_from"})
    timed = evidence.table[evidence.table["step_time_s"].notna()]
    cuts = list(table[list(FACTORS)].itertuples(index=False, name=None))
    measured = table["source"].eq("measured")
    for name, column in (("run_ids", "run_id"), ("sweep_dirs", "sweep_dir")):
        of_cut = timed[column].astype(str).groupby([timed[factor] for factor in FACTORS])
        texts = of_cut.agg(lambda own: ";".join(sorted(set(own)))).to_dict()
        table[name] = pd.Series([texts.get(cut, "") for cut in cuts]).where(measured, "")
    table["recommended"] = (table[list(FACTORS)] == list(found.geometry or ())).all(axis=1)
    return table.assign(level=LEVEL)
