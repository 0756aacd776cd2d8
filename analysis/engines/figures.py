"""Charts of engines: losses on top of each other, their differences, memory and time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label, setting_label, setting_texts
from batchscape.analysis.engines.losses import EngineLosses
from batchscape.analysis.engines.matching import counterparts, shared_settings
from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.style import GREY, palette
from batchscape.analysis.numbers import memory_scale, time_scale

_MAX_GEOMETRIES = 12
"""Geometries in the chart of costs."""
_SEEDS = "sd between seeds"


def engine_loss_charts(
    cells: Cells, curves: pd.DataFrame, losses: EngineLosses, engines: Sequence[str]
) -> Iterator[Chart]:
    """Draw the curves of all engines on top of each other, and their differences."""
    groups_of_cells = counterparts(cells)
    groups = list(dict.fromkeys(losses.pairs["group"]))
    if not groups:
        return
    titles = {
        str(g): _title(cells, int(groups_of_cells.index[groups_of_cells["group"] == g][0]))
        for g in groups
    }
    choices = [Choice("group", "Trained", titles)] if len(titles) > 1 else []
    # Earlier engines are wider, so that they show beneath the later ones.
    looks = {
        name: replace(look, symbol="stroke", width=max(3.4 - place, 0.8))
        for place, (name, look) in enumerate(palette(engines).items())
    }
    drawn_cells = groups_of_cells[groups_of_cells["group"].isin(groups)]
    lines = curves[curves["cell"].isin(drawn_cells.index)][["cell", "optimizer_step", "mean"]]
    lines = lines.assign(
        series=drawn_cells["engine"].loc[lines["cell"]].to_numpy(),
        group=drawn_cells["group"].loc[lines["cell"]].astype(str).to_numpy(),
    )
    # A layer an engine: later ones are drawn on top.
    layers = [Marks("line", lines[lines["series"] == name], line="cell") for name in engines]
    steps = Axis({"optimizer_step": "optimizer steps"})
    yield Chart(
        "engines_loss",
        "Training loss by engine",
        "Training loss of all engines on top of each other, mean over seeds, a line a "
        "decomposition.",
        steps,
        Axis({"mean": "loss"}),
        layers,
        looks,
        choices=choices,
        panels="group",
    )
    apart = losses.by_step[losses.by_step["largest"].gt(0)]
    apart = apart.assign(series=apart["engine"], group=apart["group"].astype(str))
    spread = losses.spread.assign(group=losses.spread["group"].astype(str))
    spread = spread.rename(columns={"sd": "largest"})
    if apart.empty:
        return
    by_seeds = {_SEEDS: Look(GREY.colour, GREY.dark, "stroke", (2, 2))} if len(spread) else {}
    yield Chart(
        "engines_difference",
        "Differences between engines",
        "The largest difference over seeds and decompositions from the first decomposition of "
        f"{engines[0]}, or of the next engine where that did not complete; differences of exactly "
        "0 are left out.",
        steps,
        Axis({"largest": f"largest |Δ loss| to {engines[0]}"}, kind="log"),
        [*([Marks("line", spread, _SEEDS)] if len(spread) else []), Marks("line", apart)],
        {
            **{name: replace(look, width=1.2) for name, look in looks.items()},
            **by_seeds,
        },
        choices=choices,
        panels="group",
    )


def engine_cost_charts(table: pd.DataFrame, engines: Sequence[str]) -> Iterator[Chart]:
    """Draw memory and step time of `engine_costs`, a bar an engine, a row a geometry."""
    sizes = table[["peak_allocated_gib_mean", "step_time_s_mean"]]
    if not sizes.notna().any(axis=None):
        return
    memory, time = memory_scale(sizes.iloc[:, 0]), time_scale(sizes.iloc[:, 1])
    columns = {
        "peak_allocated_gib": (f"peak memory of a device ({memory.unit})", memory.factor),
        "step_time_s": (f"median optimizer step ({time.unit})", time.factor),
    }
    costs = table.assign(row=_row_names(table), series=table["engine"])
    costs = costs[costs["row"].isin(list(dict.fromkeys(costs["row"]))[:_MAX_GEOMETRIES])]
    marks = []
    for name, (_, factor) in columns.items():
        mean, half = costs[f"{name}_mean"] * factor, costs[f"{name}_ci95"] * factor
        rows = costs[["row", "series"]].assign(
            **{name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}
        )
        is_measured = rows[name].notna()
        bars = rows.loc[is_measured, ["row", "series", name]]
        intervals = rows[is_measured].dropna(subset=f"{name}_low")
        why = costs.reindex(columns=[f"{name}_note"]).iloc[:, 0]
        missing = rows.loc[~is_measured, ["row", "series"]].assign(
            **{name: 0.0}, why="n/a: " + why[~is_measured].fillna("not measured").astype(str)
        )
        marks += [
            Marks("bar", bars, dodge=True),
            Marks("interval", intervals, dodge=True),
            Marks("text", missing, text="why", dodge=True),
        ]
    yield Chart(
        "engines_cost",
        "Memory and step time by engine",
        "Peak memory and step time of each engine for the same geometry, with 95 % t-intervals "
        f"over runs; n/a: no bar, and why. {_MAX_GEOMETRIES} geometries at most are drawn.",
        Axis({name: title for name, (title, _) in columns.items()}, "Show", from_zero=True),
        Axis({"row": ""}, kind="names"),
        [mark for mark in marks if len(mark.table)],
        {name: replace(look, symbol="square") for name, look in palette(engines).items()},
        panels="x",
    )


def _row_names(table: pd.DataFrame) -> list[str]:
    """Name each row of bars by its geometry and the settings that vary beside the engine."""
    names = geometry_label(table)
    columns = list(table.columns)
    # The settings stand between the geometry and the engine.
    between = columns[columns.index("global_batch_size") + 1 : columns.index("engine")]
    varying = [name for name in between if table[name].nunique(dropna=False) > 1]
    # A learning rate and what a rule made of it are one text under one label.
    for label, texts in {setting_label(n): setting_texts(table, n) for n in varying}.items():
        names = names + ", " + label + " " + texts
    return names.tolist()


def _title(cells: Cells, cell: int) -> str:
    row = cells.table.loc[[cell]]
    parts = [f"global batch {row['global_batch_size'].iloc[0]}"]
    settings = [name for name in shared_settings(cells) if name in cells.contexts]
    parts += [f"{setting_label(name)} {setting_texts(row, name).iloc[0]}" for name in settings]
    return ", ".join(parts)
