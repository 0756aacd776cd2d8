"""Engines side by side in the report: their losses and their costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label, setting_label, setting_texts
from batchscape.analysis.engines.costs import engine_costs
from batchscape.analysis.engines.losses import EngineLosses, compare_engines
from batchscape.analysis.engines.matching import (
    counterparts,
    engines_of,
    order_engines,
    shared_settings,
)
from batchscape.analysis.engines.programs import OBSERVED, observed_batches
from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.style import GREY, palette
from batchscape.analysis.numbers import MISSING, significant
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.tables import geometry_column, setting_columns
from batchscape.analysis.report.topic import Section
from batchscape.record.tables import Tables

_SEEDS = "sd between seeds"
_DECLARED = "declared_exchange"

_HEADERS = dict(
    zip(OBSERVED, ("ranks", "micro-batch", "accumulation", "global batch"), strict=True)
)


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
            views.append(_losses_view(losses.pairs, cells))
            charts += _loss_charts(cells, losses, engines)
        costs = engine_costs(cells, tables.ranks)
        if len(costs):
            answer += _exchange(costs)
            views.append(_costs_view(costs, cells))
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
        views.append(_observed_view(observed, cells))
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


def _loss_charts(cells: Cells, losses: EngineLosses, engines: Sequence[str]) -> Iterator[Chart]:
    """Draw the differences between the curves of engines."""
    apart = losses.by_step[losses.by_step["largest"].gt(0)]
    if apart.empty:
        return
    groups_of_cells = counterparts(cells)
    titles = {
        str(g): _title(cells, int(groups_of_cells.index[groups_of_cells["group"] == g][0]))
        for g in dict.fromkeys(losses.pairs["group"])
    }
    apart = apart.assign(series=apart["engine"], group=apart["group"].astype(str))
    spread = losses.spread.assign(group=losses.spread["group"].astype(str))
    spread = spread.rename(columns={"sd": "largest"})
    by_seeds = {_SEEDS: Look(GREY.colour, GREY.dark, "stroke", (2, 2))} if len(spread) else {}
    yield Chart(
        "engines_difference",
        "Differences between engines",
        "The largest difference over seeds and decompositions from the first decomposition of "
        f"{engines[0]}, or of the next engine where that did not complete; differences of exactly "
        "0 are left out.",
        Axis({"optimizer_step": "optimizer steps"}),
        Axis({"largest": f"largest |Δ loss| to {engines[0]}"}, kind="log"),
        [*([Marks("line", spread, _SEEDS)] if len(spread) else []), Marks("line", apart)],
        {**palette(engines), **by_seeds},
        choices=[Choice("group", "Trained", titles)] if len(titles) > 1 else [],
        panels="group",
    )


def _title(cells: Cells, cell: int) -> str:
    row = cells.table.loc[[cell]]
    parts = [f"global batch {row['global_batch_size'].iloc[0]}"]
    settings = [name for name in shared_settings(cells) if name in cells.contexts]
    parts += [f"{setting_label(name)} {setting_texts(row, name).iloc[0]}" for name in settings]
    return ", ".join(parts)


def _losses_view(pairs: pd.DataFrame, cells: Cells) -> Table:
    """Show the differences of `compare_engines`."""
    settings = _key_settings(cells)
    one_cell = counterparts(cells).drop_duplicates("group")
    head = cells.table.loc[one_cell.index, ["global_batch_size", *shared_settings(cells)]]
    table = pairs.join(head.set_axis(pd.Index(one_cell["group"])), on="group")
    is_alone = table["engine"] == table["other"]
    within = table["engine"].where(~is_alone, table["engine"] + ", within")
    return Table(
        "engines_loss",
        "Losses of engines, compared with each other",
        table,
        [
            Column("engine", texts=within, is_left=True),
            Column("other", "and", texts=table["other"].where(~is_alone, ""), is_left=True),
            Column("global_batch_size", "global batch", is_left=True),
            *setting_columns(table, settings),
            Column("n_seeds", "seeds"),
            Column("n_runs", "runs"),
            Column("n_optimizer_steps", "paired steps"),
            Column("max_abs_difference", "max |Δ loss|", format=2),
            Column("max_relative_difference", "max |Δ loss| / loss", format=2),
            Column("seed_sd", "sd between seeds", format=2),
        ],
        notes=[
            "Δ loss: difference of training losses at the same seed, global batch and optimizer "
            "step, the largest over all decompositions of both engines; within: between "
            "decompositions of one engine. 0 means equal to the last bit.",
        ],
    )


def _costs_view(table: pd.DataFrame, cells: Cells) -> Table:
    """Show the costs of `engine_costs`."""
    declared = table["exchanges_every_micro_step"].mask(table["data_parallel_size"].eq(1))
    figures = {
        "peak_allocated_gib": ("peak memory", "GiB"),
        "uss_gib": ("process", "GiB"),
        "step_time_s": ("step time", "s"),
        "exchange_s": ("exchange", "s"),
    }
    return Table(
        "engines_cost",
        "What each engine needs for the same geometry",
        table.assign(**{_DECLARED: declared}),
        [
            geometry_column(table),
            *setting_columns(table, _key_settings(cells)),
            Column("engine", is_left=True),
            Column("n", "runs"),
            *(
                Column(f"{name}_mean", *label_and_unit, spread=f"{name}_ci95")
                for name, label_and_unit in figures.items()
            ),
            Column("exchanged_bytes", "bytes a step", format=".0f"),
            Column(_DECLARED, "exchanged", words={True: "every micro-step", False: "once"}),
        ],
        notes=[
            "Means ± half-widths of 95 % t-intervals over runs, from 3 runs on. peak memory: "
            "allocated on the fullest device; process: resident memory without shared pages; "
            "exchange: the part of the step time that backward did not hide; "
            f"{MISSING}: not measured, or the machine was not free.",
            "bytes a step: gradient bytes that a rank gives to the exchange in an optimizer step. "
            f"exchanged: as the engine declares it; {MISSING}: one device.",
        ],
        hidden=[_DECLARED],
    )


def _observed_view(table: pd.DataFrame, cells: Cells) -> Table:
    """Show the batches of `observed_batches`; the table is not empty."""
    sources = []
    for row in table.to_dict("records"):
        sources_of_run = {
            row[f"{name}_source"] for name in OBSERVED if pd.notna(row[f"observed_{name}"])
        }
        texts = sorted(source for source in sources_of_run if isinstance(source, str))
        sources.append(f"source: {', '.join(texts)}" if texts else None)
    labels = table["cell"].map(geometry_label(cells.table))
    return Table(
        "observed_batches",
        "Batches that programs used",
        table,
        [
            Column("planned geometry", texts=labels, is_left=True),
            Column("run_id", "run", is_left=True),
            Column("status", is_left=True),
            *(
                Column(f"observed_{name}", header, texts=_observed_texts(table, name))
                for name, header in _HEADERS.items()
            ),
            Column("agrees", "as planned", words={True: "yes", False: "no"}),
        ],
        footnotes=[sources],
        notes=[
            f"The batch that each program was observed to use; {MISSING}: not observed, which "
            "contradicts nothing and confirms nothing. A run is as planned if its global batch is."
        ],
    )


def _observed_texts(table: pd.DataFrame, name: str) -> list[str]:
    pairs = zip(table[f"observed_{name}"], table[f"planned_{name}"], strict=True)
    return [
        MISSING
        if pd.isna(observed)
        else str(observed)
        if observed == planned
        else f"{observed}, not {planned}"
        for observed, planned in pairs
    ]


def _key_settings(cells: Cells) -> list[str]:
    """Return the settings, beside the engine, that distinguish rows."""
    return [name for name in shared_settings(cells) if name in cells.key_settings]
