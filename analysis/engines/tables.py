"""What of the engines' tables goes on a page."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label
from batchscape.analysis.engines.matching import counterparts, shared_settings
from batchscape.analysis.engines.programs import OBSERVED
from batchscape.analysis.numbers import (
    MISSING,
    Scale,
    memory_scale,
    significant,
    time_scale,
    with_spread,
)
from batchscape.analysis.report.grids import Column, columns_grid, lettered
from batchscape.analysis.report.tables import geometry_column, setting_columns
from batchscape.analysis.report.topic import TableView

__all__ = ["costs_view", "losses_view", "observed_view"]

_HEADERS = dict(
    zip(OBSERVED, ("ranks", "micro-batch", "accumulation", "global batch"), strict=True)
)


def losses_view(pairs: pd.DataFrame, cells: Cells) -> TableView:
    """Choose what of the differences between engines is shown.

    Parameters
    ----------
    pairs : DataFrame
        As `compare_engines` returns them.
    """
    shown = _shown(cells)
    found = counterparts(cells).drop_duplicates("group")
    head = cells.table.loc[found.index, ["global_batch_size", *shared_settings(cells)]]
    table = pairs.join(head.set_axis(pd.Index(found["group"])), on="group")
    alone = table["engine"] == table["other"]
    counts = {"n_seeds": "seeds", "n_runs": "runs", "n_optimizer_steps": "paired steps"}
    sizes = {
        "max_abs_difference": "max |Δ loss|",
        "max_relative_difference": "max |Δ loss| / loss",
        "seed_sd": "sd between seeds",
    }
    grid = columns_grid(
        [
            ("engine", table["engine"].where(~alone, table["engine"] + ", within")),
            ("and", table["other"].where(~alone, "")),
            ("global batch", table["global_batch_size"].astype(str)),
            *setting_columns(table, shown),
        ],
        [
            *((header, table[name].astype(str)) for name, header in counts.items()),
            *((h, [significant(v, 2) for v in table[name]]) for name, h in sizes.items()),
        ],
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
    memory = memory_scale(table["peak_allocated_gib_mean"])
    process = memory_scale(table["uss_gib_mean"])
    time = time_scale(table["step_time_s_mean"])
    declared = table["exchanges_every_micro_step"].mask(table["data_parallel_size"].eq(1))
    words = {True: "every micro-step", False: "once"}
    grid = columns_grid(
        [
            geometry_column(table),
            *setting_columns(table, _shown(cells)),
            ("engine", table["engine"]),
        ],
        [
            ("runs", table["n"].astype(str)),
            _spreads(table, "peak_allocated_gib", "peak memory", memory),
            _spreads(table, "uss_gib", "process", process),
            _spreads(table, "step_time_s", "step time", time),
            _spreads(table, "exchange_s", "exchange", time),
            (
                "bytes a step",
                [MISSING if pd.isna(n) else f"{n:.0f}" for n in table["exchanged_bytes"]],
            ),
            ("exchanged", [MISSING if pd.isna(every) else words[every] for every in declared]),
        ],
        notes=[
            "Means ± half-widths of 95 % t-intervals over runs, from 3 runs on. peak memory: "
            "allocated on the fullest device; process: resident memory without shared pages; "
            "exchange: the part of the step time that backward did not hide; "
            f"{MISSING}: not measured, or the machine was not free.",
            "bytes a step: gradient bytes that a rank gives to the exchange in an optimizer step. "
            f"exchanged: as the engine declares it; {MISSING}: one device.",
        ],
    )
    return TableView("engines_cost", "What each engine needs for the same geometry", table, grid)


def observed_view(table: pd.DataFrame, cells: Cells) -> TableView:
    """Choose what of the observations goes on a page.

    Parameters
    ----------
    table : DataFrame
        As `observed_batches` returns it; not empty.
    cells : Cells
        What it was computed from.
    """
    sources = []
    for row in table.to_dict("records"):
        found = {row[f"{name}_source"] for name in OBSERVED if pd.notna(row[f"observed_{name}"])}
        texts = sorted(source for source in found if isinstance(source, str))
        sources.append([f"seen in: {', '.join(texts)}" if texts else None])
    grid = columns_grid(
        [
            ("planned geometry", table["cell"].map(geometry_label(cells.table))),
            ("run", table["run_id"]),
            ("status", table["status"]),
        ],
        [
            *((header, _seen(table, name)) for name, header in _HEADERS.items()),
            (
                "as planned",
                [MISSING if pd.isna(a) else "yes" if a else "no" for a in table["agrees"]],
            ),
        ],
        footnoted=lettered(sources),
        notes=[
            f"The batch that each program was seen to use; {MISSING}: not observed, which "
            "contradicts nothing and confirms nothing. As planned is a run whose global batch was."
        ],
    )
    return TableView("observed_batches", "What programs were seen to use", table, grid)


def _seen(table: pd.DataFrame, name: str) -> Iterable[str]:
    for seen, planned in zip(table[f"observed_{name}"], table[f"planned_{name}"], strict=True):
        if pd.isna(seen):
            yield MISSING
        else:
            yield str(seen) if seen == planned else f"{seen}, not {planned}"


def _shown(cells: Cells) -> list[str]:
    """Name the settings beside the engine that tell rows apart."""
    return [name for name in shared_settings(cells) if name in cells.shown]


def _spreads(table: pd.DataFrame, name: str, label: str, scale: Scale) -> Column:
    pairs = zip(table[f"{name}_mean"], table[f"{name}_ci95"], strict=True)
    texts = [with_spread(mean * scale.factor, half * scale.factor) for mean, half in pairs]
    return f"{label} ({scale.unit})", texts
