"""What the report says of engines: do they train alike, and what does each of them cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.engines.costs import engine_costs
from batchscape.analysis.engines.figures import engine_cost_chart, engine_loss_charts
from batchscape.analysis.engines.losses import EngineLosses, compare_engines
from batchscape.analysis.engines.matching import counterparts, engines_of, in_order
from batchscape.analysis.engines.programs import observed_batches
from batchscape.analysis.engines.tables import costs_view, losses_view, observed_view
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.figures.curves import mean_curves
from batchscape.analysis.numbers import significant
from batchscape.analysis.report.table import Table
from batchscape.analysis.report.topic import Section
from batchscape.record.tables import Tables


def engines_section(cells: Cells, tables: Tables) -> Section | None:
    """Show engines side by side; None where all runs have one engine and none is a program."""
    observed = observed_batches(cells)
    engines = in_order(engines_of(cells))
    several = len({name.partition(",")[0] for name in engines}) > 1
    if observed.empty and not several:
        return None
    answer: list[str] = []
    warnings: list[str] = []
    views: list[Table] = []
    pictures: list[Chart] = []
    if several:
        costs = engine_costs(cells, tables.ranks)
        paired = not counterparts(cells).empty
        losses = compare_engines(cells, tables.steps) if paired else None
        if losses is not None and len(losses.pairs):
            answer += _differences(losses.pairs)
            warnings += _beyond(losses.pairs, float(cells.runs["measure.equivalence_margin"].min()))
            views.append(losses_view(losses.pairs, cells))
        else:
            answer.append("No two engines completed the same training, seed by seed.")
            losses = None
        if len(costs):
            answer += _exchange(costs)
            views.append(costs_view(costs, cells))
        pictures = _pictures(cells, tables, losses, costs, engines)
    if len(observed):
        answer.append(_observed(observed))
        warnings += _unobserved(observed)
        views.append(observed_view(observed, cells))
    return Section("Engines side by side", answer, views, pictures, warnings)


def _differences(pairs: pd.DataFrame) -> Iterator[str]:
    between = pairs[pairs["engine"] != pairs["other"]]
    largest = between.nlargest(1, "max_abs_difference").iloc[0]
    text = (
        "At the same seed, global batch and optimizer step, the training losses of two engines "
        f"differ by {significant(largest['max_abs_difference'], 2)} at most "
        f"({largest['engine']} and {largest['other']})"
    )
    within = pairs.loc[pairs["engine"] == pairs["other"], "max_abs_difference"].max()
    scales = [] if math.isnan(within) else [f"decompositions of one engine by {_short(within)}"]
    if not math.isnan(sd := pairs["seed_sd"].max()):
        scales.append(f"seeds by {_short(sd)} (sd)")
    yield f"{text}; {', '.join(scales)}." if scales else f"{text}."


def _beyond(pairs: pd.DataFrame, margin: float) -> Iterator[str]:
    between = pairs[(pairs["engine"] != pairs["other"]) & pairs["max_abs_difference"].gt(margin)]
    if len(between):
        engine_texts = [
            f"{row['engine']} and {row['other']} by {_short(row['max_abs_difference'])}"
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


def _observed(observed: pd.DataFrame) -> str:
    agrees = observed["agrees"]
    counts = {
        "were seen to use the planned batch": int(agrees.eq(True).sum()),
        "were seen to use another": int(agrees.eq(False).sum()),
        "did not let their global batch be observed": int(agrees.isna().sum()),
    }
    counts_text = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"Of {len(observed)} runs of programs, {counts_text}."


def _unobserved(observed: pd.DataFrame) -> Iterator[str]:
    ended = observed["status"].isin(["completed", "diverged"])
    if n := int((ended & observed["agrees"].isna()).sum()):
        yield (
            f"Nothing confirms the global batch of {n} runs: a program that ignores what it is "
            "told would look the same. Let it tell its samples, tokens or accumulation: by the "
            "recorder, or the geometry_pattern of the regex reader (docs/own_script.md)."
        )


def _pictures(
    cells: Cells,
    tables: Tables,
    losses: EngineLosses | None,
    costs: pd.DataFrame,
    engines: Sequence[str],
) -> list[Chart]:
    charts: list[Chart] = []
    if losses is not None:
        curves = mean_curves(cells, tables.steps, "loss", timed=False)
        charts += engine_loss_charts(cells, curves, losses, engines)
    cost = engine_cost_chart(costs, engines) if len(costs) else None
    return [*charts, cost] if cost else charts


def _short(value: float) -> str:
    return significant(value, 2)
