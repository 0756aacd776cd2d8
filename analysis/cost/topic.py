"""Cost models and scaling in the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.cost.memory_model import MemoryModel, fit_memory
from batchscape.analysis.cost.scaling import scaling_efficiency
from batchscape.analysis.cost.step_time import fit_step_time
from batchscape.analysis.cost.table import FACTORS, MEMORY_PHASES, cost_table, is_sharded
from batchscape.analysis.estimates import NOT_IDENTIFIED, Estimate
from batchscape.analysis.figures.chart import Axis, Chart, Look, Marks
from batchscape.analysis.figures.style import palette
from batchscape.analysis.numbers import memory_scale, time_scale
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.errors import AnalysisError

_MAX_GROUPS = 6
"""Groups in text and figures; the table has all."""
_PARTS = ("value", "low", "high", "unit", "method", "definition", "note")
"""Of an estimate, as columns."""
_PEAK = "peak_allocated_gib"
"""The peak of all phases, which is shown where there is no other."""
Row = dict[str, object]
_TERMS = {
    "fixed_gib": "memory, fixed",
    "per_sample_gib": "memory, a sample of the micro-batch",
    "accumulation_gib": "memory, accumulation above 1",
    "devices_gib": "memory, more than one device",
    "micro_step_fixed_s": "time, a micro-step",
    "per_sample_s": "time, a sample of a micro-step",
    "exchange_s": "time, exchange at two devices",
    "optimizer_s": "time, update",
}


def memory_models(cells: Cells) -> dict[int, MemoryModel]:
    """Fit memory in each group of `cost_groups` that has a figure of it."""
    models = {}
    for group, runs in cost_table(cells).groupby("group"):
        with suppress(AnalysisError):
            is_cut = is_sharded(cells.runs[cells.runs["cell"].isin(runs["cell"])])
            models[int(str(group))] = fit_memory(runs, is_sharded=is_cut)
    return models


def cost_section(cells: Cells, models: Mapping[int, MemoryModel] | None = None) -> Section | None:
    """Fit the cost models of every group of comparable runs; None where no figure was measured.

    `models` are the `memory_models` of the cells, where they are there already.
    """
    models = memory_models(cells) if models is None else models
    table = cost_table(cells)
    terms, scaled, answer = list[Row](), list[pd.DataFrame](), list[str]()
    charts, headlines = list[Chart](), dict[str, Estimate]()
    for group, runs in table.groupby("group"):
        label, number = str(runs["group_label"].iloc[0]), int(str(group))
        suffix, texts, of_group = f"_{number}" if label else "", list[str](), dict[str, Estimate]()
        if (memory := models.get(number)) is not None:
            for name, fit in memory.phases.items():
                terms += _terms(label, MEMORY_PHASES[name], fit.estimates, fit.cells)
            limit = memory.phases[memory.limiting[-1]].estimates
            when = f"a device's memory ({MEMORY_PHASES[memory.limiting[-1]]})"
            texts.append(_parted(when, limit["fixed_gib"], limit["per_sample_gib"]))
            of_group = {f"memory_{name}{suffix}": estimate for name, estimate in limit.items()}
            if number < _MAX_GROUPS and (chart := _memory_chart(memory, suffix, label)):
                charts.append(chart)
        try:
            times = fit_step_time(runs)
        except AnalysisError:
            texts.append("No step time is valid, so there is no model of it.")
        else:
            terms += _terms(label, "optimizer step", times.estimates, times.cells)
            parts = [times.estimates[name] for name in ("micro_step_fixed_s", "per_sample_s")]
            texts.append(_parted("a micro-step's time", *parts))
            texts += _worst_error(times.cells["left_out_error_pct"].abs().max())
            of_group |= {f"step_{name}{suffix}": e for name, e in times.estimates.items()}
            scaled.append(scaling_efficiency(runs).assign(group=label))
            texts += _most_devices(scaled[-1])
        if number < _MAX_GROUPS:
            answer += [f"{label}: {text}" if label else text for text in texts]
        headlines |= {name: replace(estimate, group=label) for name, estimate in of_group.items()}
    if not terms:
        return None
    views = [_models(pd.DataFrame(terms))]
    efficiency = pd.concat(scaled, ignore_index=True) if scaled else pd.DataFrame()
    if len(efficiency):
        views.append(_scaling(efficiency))
    return Section("What a step costs", answer, views, charts, headlines=headlines)


def _worst_error(error_pct: float) -> list[str]:
    text = f"A cell's step time, predicted from the other cells, is off by up to {error_pct:.2g} %."
    return [text] if pd.notna(error_pct) else []


def _most_devices(efficiency: pd.DataFrame) -> Iterator[str]:
    for kind, comparisons in efficiency.groupby("kind") if len(efficiency) else ():
        most = comparisons.sort_values("devices", kind="stable").iloc[-1]
        yield (
            f"{str(kind).capitalize()} scaling to {most['devices']} devices (equal "
            f"{most['held']}): {most['geometry']} has {most['estimate'].text()} times the "
            f"throughput per device of {most['reference']}, by median step times."
        )


def _terms(
    label: str, phase: str, estimates: Mapping[str, Estimate], cuts: pd.DataFrame
) -> Iterator[Row]:
    for name, estimate in estimates.items():
        yield {
            "group": label,
            "phase": phase,
            "term": name,
            **{part: getattr(estimate, part) for part in _PARTS},
            "cells": estimate.n,
            "max_residual_pct": (100 * cuts["residual"] / cuts["measured"]).abs().max(),
            "max_left_out_error_pct": cuts["left_out_error_pct"].abs().max(),
            "run_ids": ";".join(filter(None, cuts["run_ids"])),
        }


def _parted(what: str, fixed: Estimate, slope: Estimate) -> str:
    texts = []
    for estimate in (fixed, slope):
        value = estimate.value
        scale = memory_scale([value]) if estimate.unit == "GiB" else time_scale([value])
        ends = {name: getattr(estimate, name) * scale.factor for name in ("value", "low", "high")}
        unit = f" {scale.unit}" if estimate.is_identified else ""
        texts.append(replace(estimate, **ends).text() + unit)
    return f"Of {what}, the fixed part is {texts[0]}; the part of a sample is {texts[1]}."


def _models(table: pd.DataFrame) -> Table:
    is_shown = table["phase"].ne(MEMORY_PHASES[_PEAK])
    notes = table["note"].map(lambda n: n.removeprefix(f"{NOT_IDENTIFIED}: "), na_action="ignore")
    return Table(
        "cost_models",
        "Cost models",
        table,
        [
            Column("group", is_left=True),
            Column("phase", "phase of a run", is_left=True),
            Column("term", words=_TERMS, is_left=True),
            Column(
                "value",
                "estimate [95 %]",
                format=3,
                low="low",
                high="high",
                n="cells",
                units="unit",
                missing=NOT_IDENTIFIED,
            ),
            Column("cells"),
        ],
        np.flatnonzero(is_shown).tolist(),
        footnotes=[notes],
        notes=[
            "Memory = fixed + slope x micro-batch + a term each for accumulation above 1 and for "
            "more than one device. Step time = accumulation x (micro-step + slope x micro-batch) + "
            "exchange x 2 (D - 1) / D + update. Intervals: t, the cells being the units."
        ],
    )


def _scaling(table: pd.DataFrame) -> Table:
    return Table(
        "scaling_efficiency",
        "Scaling efficiency",
        table.drop(columns="estimate"),
        [
            Column("group", is_left=True),
            Column(
                "scaling",
                "scaling, and what stays equal",
                texts=table["kind"] + ", equal " + table["held"],
                is_left=True,
            ),
            Column("geometry", is_left=True),
            Column("reference", "against", is_left=True),
            Column("efficiency", "throughput per device [95 %]", "", 3, "low", "high", n="n"),
            Column("n", "pairs"),
        ],
        notes=[
            "Throughput per device over that of the geometry it is set against, by median step "
            "times: 1 is ideal. Geometric mean over runs paired by seed, t-interval of the mean "
            "log."
        ],
    )


def _memory_chart(model: MemoryModel, suffix: str, label: str) -> Chart | None:
    """Draw memory against the micro-batch by phase, with the fitted lines of one device."""
    micros = model.measured["micro_batch_size"]
    if micros.nunique() < 2:
        return None
    names = [name for name in model.phases if name != _PEAK] or [_PEAK]
    phases = {MEMORY_PHASES[name]: model.phases[name] for name in names}
    scale = memory_scale([float(phase.cells["measured"].max()) for phase in phases.values()])
    grid = np.linspace(micros.min(), micros.max(), 60)
    lines, points, looks = [], [], dict[str, Look]()
    for series, look in palette(phases).items():
        phase = phases[series]
        fitted = [phase.at(1, float(micro), 1).value * scale.factor for micro in grid]
        line = pd.DataFrame({"micro_batch_size": grid, "memory": fitted})
        lines.append(line.assign(series=series))
        cells = phase.cells[list(FACTORS)].assign(memory=phase.cells["measured"] * scale.factor)
        is_single = cells["gradient_accumulation_steps"].eq(1) & cells["data_parallel_size"].eq(1)
        other = f"{series}, other"
        points.append(cells.assign(series=np.where(is_single, series, other)))
        looks |= {series: look}
        looks |= {} if is_single.all() else {other: replace(look, hollow=True)}
    return Chart(
        f"memory_model{suffix}",
        "Memory by micro-batch, and its fit",
        "Memory of the fullest device by phase. Lines: fit for one device without accumulation; "
        f"hollow (other): cells with accumulation or more devices.{f' {label}.' if label else ''}",
        Axis({"micro_batch_size": "micro-batch (samples a device)"}),
        Axis({"memory": f"memory ({scale.unit})"}, from_zero=True),
        [Marks("line", pd.concat(lines)), Marks("point", pd.concat(points), size=20)],
        looks,
        tables=["tables/cost_models.csv"],
    )
