"""Tables of engines in the report."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label
from batchscape.analysis.engines.matching import counterparts, shared_settings
from batchscape.analysis.engines.programs import OBSERVED
from batchscape.analysis.numbers import MISSING
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.tables import geometry_column, setting_columns

_DECLARED = "declared_exchange"

_HEADERS = dict(
    zip(OBSERVED, ("ranks", "micro-batch", "accumulation", "global batch"), strict=True)
)


def losses_view(pairs: pd.DataFrame, cells: Cells) -> Table:
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


def costs_view(table: pd.DataFrame, cells: Cells) -> Table:
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


def observed_view(table: pd.DataFrame, cells: Cells) -> Table:
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
