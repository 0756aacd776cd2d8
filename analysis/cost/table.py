"""The table that cost models are fitted to: one row a completed run."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.joins import column_of
from batchscape.analysis.labels import group_labels
from batchscape.analysis.targets.schema import check
from batchscape.config import Affects, affects_of
from batchscape.errors import AnalysisError

FACTORS = ("data_parallel_size", "micro_batch_size", "gradient_accumulation_steps")
"""Columns that every cost table needs: positive integers."""

Geometry = tuple[int, int, int]
"""Devices, micro-batch and accumulation."""

MEMORY_PHASES = {
    "allocated_after_model_gib": "after the model",
    "peak_allocated_first_backward_gib": "first backward",
    "peak_allocated_first_optimizer_step_gib": "first update",
    "peak_allocated_steady_gib": "later steps",
    "peak_allocated_gib": "peak of all",
    "peak_reserved_gib": "reserved by the allocator",
    "device_used_gib": "device memory of the process",
}
"""Memory figures and how they are called, in the order of a run."""

TIME_PARTS = ("exchange_s", "optimizer_s")
"""Parts of the step time that are measured apart."""

_CONTEXT = ("sweep_dir", "run_id", "cell", "seed", "init_seed", "data_seed", "timing_repeat")


def cost_groups(cells: Cells) -> pd.DataFrame:
    """Number and label the cells by all that costs memory or time, geometry aside."""
    affects = {name: affects_of(name) for name in cells.contexts}
    # A column that is no setting tells where a run ran; versions of a model's code cost the same.
    names = [
        name
        for name, affected in affects.items()
        if (name != "source_hash" if affected is None else affected & Affects.COST)
    ]
    if not names:
        return pd.DataFrame({"group": 0, "group_label": ""}, index=cells.table.index)
    keys = cells.table[names].fillna("unknown").astype(str)
    group = keys.groupby(names, sort=False).ngroup()
    return pd.DataFrame({"group": group, "group_label": group_labels(keys)})


def cost_table(cells: Cells, groups: pd.DataFrame | None = None) -> pd.DataFrame:
    """Collect the figures that cost models are fitted to; `groups` are those of `cost_groups`.

    Returns
    -------
    DataFrame
        One row a completed run: `group`, `group_label`, `sweep_dir`, `run_id`, `cell`, seeds,
        `timing_repeat`, the three `FACTORS` and `global_batch_size`, `hardware`, the
        `MEMORY_PHASES` in GiB (maximum over ranks), and in seconds `step_time_s` (the median of
        the measured steps), `exchange_s`, `optimizer_s` and `mean_step_time_s` (the time of all
        steps over their number, with those that warm up, sample noise or are slow), NaN where the
        machine was not free.
    """
    figures = cells.figures
    runs = cells.runs.loc[figures.index]
    names = (*_CONTEXT, *FACTORS, "global_batch_size", "hardware")
    identifiers = [name for name in names if name in runs]
    groups = cost_groups(cells) if groups is None else groups
    total_s, steps = (
        pd.to_numeric(column_of(runs, name)).astype(float)
        for name in ("train_time_s", "optimizer_steps")
    )
    mean = (total_s / steps).where(figures["step_time_s"].notna())
    return pd.concat(
        [
            groups.reindex(runs["cell"]).set_axis(runs.index),
            runs[identifiers],
            figures[[*MEMORY_PHASES, "step_time_s", *TIME_PARTS]],
            mean.rename("mean_step_time_s"),
        ],
        axis=1,
    ).reset_index(drop=True)


def is_sharded(runs: pd.DataFrame) -> bool:
    """Tell whether any of some runs had an engine that cuts parameters, gradients or moments."""
    stage = pd.to_numeric(column_of(runs, "engine.zero_stage"))
    return bool((column_of(runs, "engine.name").eq("fsdp") | stage.gt(0)).any())


def one_group(
    table: pd.DataFrame, needed: Sequence[str] = (), others: Sequence[str] = ()
) -> pd.DataFrame:
    """Check a table of one group, and keep the rows that have one of the figures."""
    rows = check(table, "a cost table", (*FACTORS, *needed), others)
    if "group" in table.columns and table["group"].nunique(dropna=False) > 1:
        raise AnalysisError(
            "a cost model is of one machine, model and setting, and the table mixes several values "
            "of `group`; fit each alone, as table[table['group'] == 0]"
        )
    return rows[rows.reindex(columns=[*needed, *others]).notna().any(axis=1)].reset_index(drop=True)
