"""Engines side by side in the report, and what programs of others were seen to use."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label
from batchscape.analysis.engines.programs import OBSERVED, observed_batches
from batchscape.analysis.engines.sides import (
    RATIOS,
    compare_engines,
    engines_of,
    shared_settings,
)
from batchscape.analysis.numbers import MISSING, significant
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.tables import geometry_column, setting_columns
from batchscape.analysis.report.topic import Section, join_sections
from batchscape.record.tables import Tables

_TITLE = "Engines side by side"


def engines_section(cells: Cells, tables: Tables) -> Section | None:
    """Show engines side by side; None where all runs have one engine and none is a program."""
    parts = [_engines(cells, tables), _programs(cells)]
    sections = [part for part in parts if part is not None]
    return join_sections(_TITLE, sections) if sections else None


def _engines(cells: Cells, tables: Tables) -> Section | None:
    """Compare engines; None where there are no two."""
    engine = engines_of(cells)
    if engine.str.partition(",")[0].nunique() < 2:
        return None
    answer, warnings, views = [], [], []
    table = compare_engines(cells, tables.steps)
    if table.empty:
        answer.append("No two engines completed the same training, seed by seed.")
    else:
        largest = table.nlargest(1, "max_abs_difference").iloc[0]
        sd = table["seed_sd"].max()
        answer.append(
            "At the same seed, geometry and optimizer step, the training losses of two engines "
            f"differ by {significant(largest['max_abs_difference'], 2)} at most "
            f"({largest['engine']} and {largest['reference']})"
            + ("." if pd.isna(sd) else f"; seeds by {significant(sd, 2)} (sd).")
        )
        margin = float(cells.runs["measure.equivalence_margin"].min())
        if largest["max_abs_difference"] > margin:
            warnings.append(
                f"Engines differ by more than the margin of equivalence, {margin:g}. Their losses "
                "must not be pooled."
            )
        views.append(_engine_table(table, cells))
    keys = ["sweep_dir", "run_id"]
    column = "exchanges_every_micro_step"
    ranks = tables.ranks.reindex(columns=[*keys, column]).dropna().astype({column: bool})
    several = cells.runs.loc[cells.runs["data_parallel_size"].gt(1), [*keys, "cell"]]
    declared = ranks.astype(dict.fromkeys(keys, object)).merge(several, on=keys)
    every = declared.groupby(declared["cell"].map(engine))[column].any()
    exchanges = [
        f"{', '.join(every.index[every == value])}: {when}"
        for value, when in ((True, "in every micro-step"), (False, "once an optimizer step"))
        if every.eq(value).any()
    ]
    if exchanges:
        answer.append(f"Exchange of gradients: {'; '.join(exchanges)}.")
    return Section(_TITLE, answer, views, warnings=warnings)


def _engine_table(table: pd.DataFrame, cells: Cells) -> Table:
    settings = [name for name in shared_settings(cells) if name in cells.key_settings]
    return Table(
        "engines",
        "Engines, compared with the first one",
        table.assign(cell=table.index),
        [
            geometry_column(table),
            *setting_columns(table, settings),
            Column("engine", is_left=True),
            Column("reference", "against", is_left=True),
            Column("n_trajectories", "seeds"),
            Column("n_optimizer_steps", "paired steps"),
            Column("max_abs_difference", "max |Δ loss|", format=2),
            Column("max_relative_difference", "max |Δ loss| / loss", format=2),
            Column("seed_sd", "sd between seeds", format=2),
            *(
                Column(
                    f"{name}_ratio",
                    header,
                    "",
                    3,
                    f"{name}_ratio_low",
                    f"{name}_ratio_high",
                    n=f"{name}_ratio_n",
                )
                for name, header in RATIOS.items()
                if f"{name}_ratio" in table
            ),
        ],
        notes=[
            "Δ loss: difference of training losses at the same seed, geometry and optimizer step; "
            "0 means equal to the last bit. Ratios: of this engine over the one compared with, "
            "geometric means over pairs of runs with their 95 % t-intervals; times only where they "
            "are valid."
        ],
        hidden=["cell"],
    )


def _programs(cells: Cells) -> Section | None:
    """Set what programs were seen to use beside the plan; None without a program."""
    table = observed_batches(cells)
    if table.empty:
        return None
    agrees = table["agrees"]
    counts = {
        "used the planned batch": agrees.eq(True).sum(),
        "used another": agrees.eq(False).sum(),
        "did not let their global batch be observed": agrees.isna().sum(),
    }
    parts = [f"{count} {words}" for words, count in counts.items() if count]
    unconfirmed = (table["status"].isin(["completed", "diverged"]) & agrees.isna()).sum()
    warning = (
        f"Nothing confirms the global batch of {unconfirmed} runs: a program that ignores its "
        "settings would look the same. Let it report its samples, tokens or accumulation: by the "
        "recorder, or the geometry_pattern of the regex reader (docs/own_script.md)."
    )
    headers = ("ranks", "micro-batch", "accumulation", "global batch")
    observed = [
        Column(f"observed_{name}", header) for name, header in zip(OBSERVED, headers, strict=True)
    ]
    labels = table["cell"].map(geometry_label(cells.table))
    view = Table(
        "observed_batches",
        "Batches that programs used",
        table,
        [
            Column("planned geometry", texts=labels, is_left=True),
            Column("run_id", "run", is_left=True),
            Column("status", is_left=True),
            *observed,
            Column("agrees", "as planned", words={True: "yes", False: "no"}),
        ],
        notes=[
            f"The batch that each program was observed to use; {MISSING}: not observed, which "
            "contradicts nothing and confirms nothing. A run is as planned if its global batch is."
        ],
    )
    answer = [f"Of {len(table)} runs of programs, {', '.join(parts)}."]
    return Section(_TITLE, answer, [view], warnings=[warning] if unconfirmed else [])
