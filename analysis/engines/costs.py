"""Memory, time and exchange of a step, by engine and geometry."""

from __future__ import annotations

from typing import Any

import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells
from batchscape.analysis.comparison import spreads_of
from batchscape.analysis.engines.matching import engines_of, order_engines, shared_settings
from batchscape.analysis.joins import column_of

FIGURES = ("peak_allocated_gib", "uss_gib", "step_time_s", "exchange_s")
"""Figures that are set side by side."""
_FACTORS = ("data_parallel_size", "gradient_accumulation_steps", "micro_batch_size")


def engine_costs(cells: Cells, ranks: pd.DataFrame) -> pd.DataFrame:
    """Set the engines of each geometry side by side: one row a cell with completed runs."""
    engine = engines_of(cells)
    order = {name: number for number, name in enumerate(order_engines(engine))}
    figures = cells.figures
    figures = figures[figures["cell"].map(engine).notna()]
    groups = figures.groupby("cell")
    columns: dict[str, pd.Series[Any]] = {"n": groups.size()}
    for name, spread in spreads_of(groups[list(FIGURES)]).items():
        columns |= {f"{name}_{part}": column for part, column in spread.items()}
    runs = cells.runs.loc[figures.index]
    moved = pd.to_numeric(column_of(runs, "exchanged_bytes"))
    columns["exchanged_bytes"] = moved.astype(float).groupby(runs["cell"]).median()
    columns["exchanges_every_micro_step"] = _exchanges(cells, ranks).reindex(columns["n"].index)
    columns["run_ids"] = runs.groupby("cell")["run_id"].agg(";".join)
    head = cells.table[[*GEOMETRY, *shared_settings(cells)]].assign(engine=engine)
    table = head.join(pd.DataFrame(columns), how="inner")
    ranked = table.assign(place=table["engine"].map(order)).reset_index()
    keys = ["global_batch_size", *shared_settings(cells), *_FACTORS, "place"]
    return ranked.sort_values(keys, kind="stable", ignore_index=True).drop(columns="place")


def _exchanges(cells: Cells, ranks: pd.DataFrame) -> pd.Series[bool]:
    """Return whether the engine of each cell exchanges gradients in every micro-step."""
    name = "exchanges_every_micro_step"
    recorded = ranks.reindex(columns=["sweep_dir", "run_id", name]).dropna(subset=[name])
    keys = ["sweep_dir", "run_id"]
    by_run = recorded.astype(dict.fromkeys(keys, object)).groupby(keys)[name].any().reset_index()
    merged = cells.runs[[*keys, "cell"]].merge(by_run, on=keys)
    by_cell = merged.groupby("cell")[name].any()
    return by_cell.reindex(cells.table.index).astype("boolean")
