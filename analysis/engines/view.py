"""What of the engines' tables goes on a page."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.engines.matching import counterparts, shared_settings
from batchscape.analysis.numbers import MISSING, Scale, memory_scale, time_scale, with_spread
from batchscape.analysis.numbers import significant as rounded
from batchscape.analysis.report.grids import Grid
from batchscape.analysis.report.section import TableView
from batchscape.analysis.report.tables import GEOMETRY_HEADER, geometry_texts, setting_headers

__all__ = ["costs_view", "losses_view"]


def losses_view(pairs: pd.DataFrame, cells: Cells) -> TableView:
    """Choose what of the differences between engines is shown.

    Parameters
    ----------
    pairs : DataFrame
        As `compare_engines` returns them.
    """
    shown = _shown(cells)
    head = _settings_of_groups(cells, shown)
    table = pairs.join(head, on="group")
    names = table["engine"].where(table["engine"] != table["other"], table["engine"] + ", within")
    other = table["other"].where(table["engine"] != table["other"], "")
    columns: list[Iterable[str]] = [names, other, table["global_batch_size"].astype(str)]
    columns += [table[name].fillna(MISSING).astype(str) for name in shown]
    n_left = len(columns)
    columns += [table[name].astype(str) for name in ("n_seeds", "n_runs", "n_optimizer_steps")]
    for name in ("max_abs_difference", "max_relative_difference", "seed_sd"):
        columns.append(table[name].map(lambda value: rounded(value, 2)))
    grid = Grid(
        headers=[
            "engine",
            "and",
            "global batch",
            *setting_headers(shown),
            "seeds",
            "runs",
            "paired steps",
            "max |Δ loss|",
            "max |Δ loss| / loss",
            "sd between seeds",
        ],
        rows=[list(row) for row in zip(*columns, strict=True)],
        short_first="engine",
        n_left=n_left,
        notes=[
            "Δ loss: difference of training losses at the same seed, global batch and optimizer "
            "step, the largest over all decompositions of both engines; within: between "
            "decompositions of one engine. 0 means equal to the last bit.",
        ],
    )
    return TableView("engines_loss", "Losses of engines, held against each other", table, grid)


def costs_view(table: pd.DataFrame, cells: Cells) -> TableView:
    """Choose what of the engines' costs is shown.

    Parameters
    ----------
    table : DataFrame
        As `engine_costs` returns it.
    """
    shown = _shown(cells)
    memory = memory_scale(table["peak_allocated_gib_mean"])
    process = memory_scale(table["uss_gib_mean"])
    time = time_scale(table["step_time_s_mean"])
    columns: list[Iterable[str]] = [geometry_texts(table)]
    columns += [table[name].fillna(MISSING).astype(str) for name in shown]
    columns.append(table["engine"])
    n_left = len(columns)
    columns.append(table["n"].astype(str))
    columns += [
        _spreads(table, "peak_allocated_gib", memory),
        _spreads(table, "uss_gib", process),
        _spreads(table, "step_time_s", time),
        _spreads(table, "exchange_s", time),
        [MISSING if pd.isna(value) else f"{value:.0f}" for value in table["exchanged_bytes"]],
        [
            MISSING if pd.isna(every) or alone else "every micro-step" if every else "once"
            for every, alone in zip(
                table["exchanges_every_micro_step"], table["data_parallel_size"].eq(1), strict=True
            )
        ],
    ]
    grid = Grid(
        headers=[
            GEOMETRY_HEADER,
            *setting_headers(shown),
            "engine",
            "runs",
            f"peak memory ({memory.unit})",
            f"process ({process.unit})",
            f"step time ({time.unit})",
            f"exchange ({time.unit})",
            "bytes a step",
            "exchanged",
        ],
        rows=[list(row) for row in zip(*columns, strict=True)],
        short_first="geometry",
        n_left=n_left,
        notes=[
            "Means ± half-widths of 95 % t-intervals over runs, from 3 runs on. peak memory: "
            "allocated on the fullest device; process: resident memory without shared pages; "
            "exchange: the part of the step time that backward did not hide; "
            f"{MISSING}: not measured, or the machine was not free.",
            "bytes a step: gradient bytes that a rank gives to the exchange in an optimizer step. "
            f"exchanged: as the engine declares it; {MISSING}: one device, or a run that is "
            "older than the record of it.",
        ],
    )
    return TableView("engines_cost", "What each engine needs for the same geometry", table, grid)


def _shown(cells: Cells) -> list[str]:
    """Name the settings beside the engine that tell rows apart."""
    return [name for name in shared_settings(cells) if name in cells.shown]


def _settings_of_groups(cells: Cells, shown: list[str]) -> pd.DataFrame:
    found = counterparts(cells).drop_duplicates("group")
    head = cells.table.loc[found.index, ["global_batch_size", *shown]]
    return head.set_axis(pd.Index(found["group"]))


def _spreads(table: pd.DataFrame, name: str, scale: Scale) -> list[str]:
    pairs = zip(table[f"{name}_mean"], table[f"{name}_ci95"], strict=True)
    return [with_spread(mean * scale.factor, half * scale.factor) for mean, half in pairs]
