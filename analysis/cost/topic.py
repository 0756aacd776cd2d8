"""Cost models and scaling in the report."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.cost.figures import memory_model_chart
from batchscape.analysis.cost.memory_model import MemoryModel, fit_memory
from batchscape.analysis.cost.scaling import scaling_efficiency
from batchscape.analysis.cost.step_time import StepTimeModel, fit_step_time
from batchscape.analysis.cost.table import MEMORY_PHASES, cost_table, is_sharded
from batchscape.analysis.estimates import NOT_IDENTIFIED, Estimate
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.numbers import memory_scale, time_scale
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.errors import AnalysisError

_MAX_GROUPS = 6
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


def cost_section(cells: Cells) -> Section | None:
    """Fit the cost models of every group of comparable runs; None where no figure was measured."""
    table = cost_table(cells)
    answer: list[str] = []
    rows: list[dict[str, object]] = []
    scaled: list[pd.DataFrame] = []
    pictures: list[Chart | None] = []
    headlines: dict[str, Estimate] = {}
    for number in sorted(table["group"].unique()):
        group_runs = table[table["group"] == number]
        label = str(group_runs["group_label"].iloc[0])
        suffix = f"_{number}" if label else ""
        has_shards = is_sharded(cells.runs[cells.runs["cell"].isin(group_runs["cell"])])
        memory: MemoryModel | None = None
        times: StepTimeModel | None = None
        with suppress(AnalysisError):
            memory = fit_memory(group_runs, is_sharded=has_shards)
        with suppress(AnalysisError):
            times = fit_step_time(group_runs)
        rows += [{"group": label, **row} for row in _rows(memory, times)]
        if number < _MAX_GROUPS:
            answer += [f"{label}: {text}" if label else text for text in _answers(memory, times)]
            if memory is not None:
                pictures.append(memory_model_chart(memory, suffix, label))
        if memory is not None:
            phase_terms = memory.phases[memory.limiting[-1]].estimates
            headlines |= _headlines(phase_terms, "memory", suffix, label)
        if times is not None:
            headlines |= _headlines(times.estimates, "step", suffix, label)
            scaled.append(scaling_efficiency(group_runs).assign(group=label))
    if not rows:
        return None
    tables = [_models(pd.DataFrame(rows))]
    efficiency = pd.concat(scaled, ignore_index=True) if scaled else pd.DataFrame()
    if len(efficiency):
        tables.append(_scaling(efficiency))
        for kind, comparisons in efficiency.groupby("kind"):
            most = comparisons.sort_values("devices").iloc[-1]
            answer.append(
                f"{str(kind).capitalize()} scaling to {most['devices']} devices (equal "
                f"{most['held']}): {most['geometry']} has {most['estimate'].text()} times the "
                f"throughput per device of {most['reference']}, by median step times."
            )
    charts = [chart for chart in pictures if chart is not None]
    return Section("What a step costs", answer, tables, charts, (), headlines)


def _headlines(
    estimates: dict[str, Estimate], prefix: str, suffix: str, label: str
) -> dict[str, Estimate]:
    return {f"{prefix}_{n}{suffix}": replace(e, group=label) for n, e in estimates.items()}


def _rows(memory: MemoryModel | None, times: StepTimeModel | None) -> Iterable[dict[str, object]]:
    fits = []
    if memory is not None:
        fits += [(MEMORY_PHASES[n], p.estimates, p.cells) for n, p in memory.phases.items()]
    if times is not None:
        fits.append(("optimizer step", times.estimates, times.cells))
    for phase, estimates, cells in fits:
        for name, estimate in estimates.items():
            yield {
                "phase": phase,
                "term": name,
                "value": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "unit": estimate.unit,
                "cells": estimate.n,
                "method": estimate.method,
                "definition": estimate.definition,
                "note": estimate.note,
                "max_residual_pct": float(
                    (100 * cells["residual"] / cells["measured"]).abs().max()
                ),
                "max_left_out_error_pct": float(cells["left_out_error_pct"].abs().max()),
                "run_ids": ";".join(filter(None, cells["run_ids"])),
            }


def _answers(memory: MemoryModel | None, times: StepTimeModel | None) -> Iterable[str]:
    if memory is not None:
        phase = memory.phases[memory.limiting[-1]]
        slope = phase.estimates["per_sample_gib"]
        fixed = phase.estimates["fixed_gib"]
        when = MEMORY_PHASES[memory.limiting[-1]]
        if slope.value > 0 and not slope.low <= 0:
            base = f"{_with_unit(fixed)} and " if fixed.is_identified else ""
            ending = "" if base else "; what it needs beside is not identified"
            text = f"A device needs {base}{_with_unit(slope)} a sample of the micro-batch ({when})"
            yield f"{text}{ending}."
        elif slope.is_identified:
            text = f"Memory was not found to grow with the micro-batch ({when}): "
            yield f"{text}{_with_unit(slope)} a sample."
    if times is None:
        yield "No step time is valid, so there is no model of it."
        return
    start, slope = times.estimates["micro_step_fixed_s"], times.estimates["per_sample_s"]
    if start.is_identified and slope.is_identified:
        yield f"A micro-step takes {_with_unit(start)} and {_with_unit(slope)} a sample."
    else:
        unknown = start if slope.is_identified else slope
        yield f"How the time of a micro-step grows with its samples is {unknown.note}."
    error = times.cells["left_out_error_pct"].abs().max()
    if pd.notna(error):
        yield f"A cell's step time, predicted from the other cells, is off by up to {error:.2g} %."


def _with_unit(estimate: Estimate) -> str:
    scale = (memory_scale if estimate.unit == "GiB" else time_scale)([estimate.value])
    value, low, high = (end * scale.factor for end in (estimate.value, estimate.low, estimate.high))
    return f"{replace(estimate, value=value, low=low, high=high).text()} {scale.unit}"


def _models(table: pd.DataFrame) -> Table:
    is_shown = table["phase"].ne(MEMORY_PHASES["peak_allocated_gib"])
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
