"""The memory of a rank, and the peak that is compared with it."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any

import pandas as pd

from batchscape.analysis.cost.table import MEMORY_PHASES
from batchscape.analysis.joins import column_of

LIMITED = "memory_limit_gib"
"""Column of a limit that emulates a smaller device."""

_HOST = "environment.memory_gib"
_DEVICE = "launch.device_memory_gib"
PEAK_FIGURES = {
    "peak_taken_gib": "private memory mapped above the start",
    **{name: MEMORY_PHASES[name] for name in ("device_used_gib", "peak_reserved_gib")},
    "peak_allocated_gib": "tensors",
}
"""Figures of a peak in order of preference, and their labels."""


def memory_of_ranks(runs: pd.DataFrame) -> pd.Series[float]:
    """Return the memory that each rank of a run had, in GiB; NaN where it is unknown."""
    columns = ["device_type", "launch.devices", "data_parallel_size", LIMITED, _HOST, _DEVICE]
    rows = runs.reindex(columns=columns).astype(object)
    memory = pd.Series([_memory(*row) for row in rows.to_numpy()], runs.index, float)
    shared = pd.to_numeric(column_of(runs, "launch.runs_per_device")).astype(float).gt(1)
    return memory.mask(shared & rows[LIMITED].isna())


def device_memory(runs: pd.DataFrame) -> float:
    """Return the memory of each device of runs on equal ones, in GiB; NaN where it is unknown."""
    limits = pd.to_numeric(column_of(runs, LIMITED)).astype(float)
    if limits.notna().any():
        return float(limits.iloc[0]) if limits.nunique(dropna=False) == 1 else math.nan
    return float(pd.to_numeric(column_of(runs, _DEVICE)).astype(float).min())


def peaks_of_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the figure that decides whether a run fits: `peak_gib`, and its name `peak_figure`."""
    limited = column_of(runs, LIMITED).notna()
    peaks = pd.DataFrame({"peak_gib": math.nan, "peak_figure": None}, index=runs.index)
    for name in PEAK_FIGURES:
        values = pd.to_numeric(column_of(runs, name)).astype(float)
        usable = values.notna() & peaks["peak_gib"].isna()
        if name == "device_used_gib":
            usable &= ~limited
        peaks.loc[usable, "peak_gib"] = values[usable]
        peaks.loc[usable, "peak_figure"] = name
    return peaks


def _memory(device_type: object, devices: object, *figures: Any) -> float:  # noqa: ANN401  (of a table)
    ranks, limit_gib, host_gib, device_gib = (
        math.nan if figure is None or pd.isna(figure) else float(figure) for figure in figures
    )
    if device_type == "cpu":
        # A device of a CPU is one rank, so a limit is already a rank's.
        return limit_gib if math.isfinite(limit_gib) else host_gib / ranks
    n_devices = len(devices) if isinstance(devices, Sized) and not isinstance(devices, str) else 0
    ranks_per_device = math.ceil(ranks / n_devices) if n_devices else 1
    return (limit_gib if math.isfinite(limit_gib) else device_gib) / ranks_per_device
