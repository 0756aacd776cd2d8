"""Engines side by side in the report: their losses and their costs."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.engines.costs import engine_costs
from batchscape.analysis.engines.figures import engine_loss_charts
from batchscape.analysis.engines.losses import compare_engines
from batchscape.analysis.engines.matching import counterparts, engines_of, order_engines
from batchscape.analysis.engines.programs import observed_batches
from batchscape.analysis.engines.tables import costs_view, losses_view, observed_view
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.numbers import significant
from batchscape.analysis.report.table import Table
from batchscape.analysis.report.topic import Section
from batchscape.record.tables import Tables


def engines_section(cells: Cells, tables: Tables) -> Section | None:
    """Show engines side by side; None where all runs have one engine and none is a program."""
    observed = observed_batches(cells)
    engines = order_engines(engines_of(cells))
    several = len({name.partition(",")[0] for name in engines}) > 1
    if observed.empty and not several:
        return None
    answer: list[str] = []
    warnings: list[str] = []
    views: list[Table] = []
    charts: list[Chart] = []
    if several:
        losses = None if counterparts(cells).empty else compare_engines(cells, tables.steps)
        if losses is None or losses.pairs.empty:
            answer.append("No two engines completed the same training, seed by seed.")
        else:
            answer.append(_differences(losses.pairs))
            margin = float(cells.runs["measure.equivalence_margin"].min())
            warnings += _beyond(losses.pairs, margin)
            views.append(losses_view(losses.pairs, cells))
            charts += engine_loss_charts(cells, losses, engines)
        costs = engine_costs(cells, tables.ranks)
        if len(costs):
            answer += _exchange(costs)
            views.append(costs_view(costs, cells))
    if len(observed):
        agrees = observed["agrees"]
        counts = {
            "used the planned batch": agrees.eq(True).sum(),
            "used another": agrees.eq(False).sum(),
            "did not let their global batch be observed": agrees.isna().sum(),
        }
        parts = [f"{count} {words}" for words, count in counts.items() if count]
        answer.append(f"Of {len(observed)} runs of programs, {', '.join(parts)}.")
        unconfirmed = (observed["status"].isin(["completed", "diverged"]) & agrees.isna()).sum()
        if unconfirmed:
            warnings.append(
                f"Nothing confirms the global batch of {unconfirmed} runs: a program that ignores "
                "its settings would look the same. Let it report its samples, tokens or "
                "accumulation: by the recorder, or the geometry_pattern of the regex reader "
                "(docs/own_script.md)."
            )
        views.append(observed_view(observed, cells))
    return Section("Engines side by side", answer, views, charts, warnings)


def _differences(pairs: pd.DataFrame) -> str:
    is_within = pairs["engine"] == pairs["other"]
    largest = pairs[~is_within].nlargest(1, "max_abs_difference").iloc[0]
    text = (
        "At the same seed, global batch and optimizer step, the training losses of two engines "
        f"differ by {significant(largest['max_abs_difference'], 2)} at most "
        f"({largest['engine']} and {largest['other']})"
    )
    within, sd = pairs.loc[is_within, "max_abs_difference"].max(), pairs["seed_sd"].max()
    scales = []
    if not math.isnan(within):
        scales.append(f"decompositions of one engine by {significant(within, 2)}")
    if not math.isnan(sd):
        scales.append(f"seeds by {significant(sd, 2)} (sd)")
    return f"{text}; {', '.join(scales)}." if scales else f"{text}."


def _beyond(pairs: pd.DataFrame, margin: float) -> Iterator[str]:
    between = pairs[(pairs["engine"] != pairs["other"]) & pairs["max_abs_difference"].gt(margin)]
    if len(between):
        engine_texts = [
            f"{row['engine']} and {row['other']} by {significant(row['max_abs_difference'], 2)}"
            for row in between.nlargest(3, "max_abs_difference").to_dict("records")
        ]
        yield (
            f"Engines differ by more than the margin of equivalence, {margin:g}: "
            f"{', '.join(engine_texts)}. Their losses must not be pooled."
        )


def _exchange(costs: pd.DataFrame) -> Iterator[str]:
    several = costs[costs["data_parallel_size"].gt(1)]
    recorded = several.dropna(subset=["exchanges_every_micro_step"])
    every = recorded.groupby("engine", sort=False)["exchanges_every_micro_step"].any()
    parts = [
        f"{', '.join(every.index[every == value])}: {when}"
        for value, when in ((True, "in every micro-step"), (False, "once an optimizer step"))
        if every.eq(value).any()
    ]
    if parts:
        yield f"Exchange of gradients: {'; '.join(parts)}."
