"""How much memory a rank had, and which of its figures is held against that."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any

import pandas as pd

from batchscape.analysis.cost.table import MEMORY_PHASES

__all__ = ["LIMITED", "PEAK_FIGURES", "device_memory", "memory_of_ranks", "peaks_of_runs"]

LIMITED = "memory_limit_gib"
"""Column of a limit that emulates a smaller device."""

_HOST = "environment.memory_gib"
_DEVICE = "launch.device_memory_gib"
PEAK_FIGURES = {
    "peak_taken_gib": "private memory mapped above the start",
    **{name: MEMORY_PHASES[name] for name in ("device_used_gib", "peak_reserved_gib")},
    "peak_allocated_gib": "tensors",
}
"""Figures by rank, and how they are called."""


def memory_of_ranks(runs: pd.DataFrame) -> pd.Series[float]:
    """Return the memory that each rank of a run had.

    Parameters
    ----------
    runs : DataFrame
        One row a run, as `load` returns it.

    Returns
    -------
    Series of float
        In GiB: the limit of a device, where it had one; else all of its memory. Ranks that share a
        device, or the host as ranks on a CPU do, have equal parts. NaN where nothing tells, or
        other runs had a part without a limit.
    """
    columns = ["device_type", "launch.devices", "data_parallel_size", LIMITED, _HOST, _DEVICE]
    rows = runs.reindex(columns=columns).astype(object)
    memory = pd.Series([_memory(*row) for row in rows.to_numpy()], runs.index, float)
    shared = pd.to_numeric(_column(runs, "launch.runs_per_device")).astype(float).gt(1)
    return memory.mask(shared & rows[LIMITED].isna())


def device_memory(runs: pd.DataFrame) -> float:
    """Return the memory of each device of runs that ran on equal ones.

    Parameters
    ----------
    runs : DataFrame
        One row a run, as `load` returns it.

    Returns
    -------
    float
        In GiB: the limit where all had the same one, else the smallest CUDA device's; NaN where it
        is not known, or where some had a limit and some had none.
    """
    limits = pd.to_numeric(_column(runs, LIMITED)).astype(float)
    if limits.notna().any():
        return float(limits.iloc[0]) if limits.nunique(dropna=False) == 1 else math.nan
    return float(pd.to_numeric(_column(runs, _DEVICE)).astype(float).min())


def peaks_of_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the figure of each run that decides whether it fits.

    Parameters
    ----------
    runs : DataFrame
        One row a run, as `load` returns it.

    Returns
    -------
    DataFrame
        `peak_gib` of the fullest rank, and `peak_figure`, a name of `PEAK_FIGURES`: what the
        process took (CPU) or the device sees of it (CUDA); under a limit of CUDA, what the
        allocator held; else tensors.
    """
    limited = _column(runs, LIMITED).notna()
    found = pd.DataFrame({"peak_gib": math.nan, "peak_figure": None}, index=runs.index)
    for name in PEAK_FIGURES:
        values = pd.to_numeric(_column(runs, name)).astype(float)
        allowed = values.notna() & found["peak_gib"].isna()
        if name == "device_used_gib":
            allowed &= ~limited
        found.loc[allowed, "peak_gib"] = values[allowed]
        found.loc[allowed, "peak_figure"] = name
    return found


def _column(runs: pd.DataFrame, name: str) -> pd.Series[Any]:
    return runs.reindex(columns=[name])[name]


def _memory(device_type: object, devices: object, *figures: Any) -> float:  # noqa: ANN401  (of a table)
    ranks, limit_gib, host_gib, device_gib = (
        math.nan if figure is None or pd.isna(figure) else float(figure) for figure in figures
    )
    if device_type == "cpu":
        # A device of a CPU is one rank, so a limit is already a rank's.
        return limit_gib if math.isfinite(limit_gib) else host_gib / ranks
    used = len(devices) if isinstance(devices, Sized) and not isinstance(devices, str) else 0
    sharing = math.ceil(ranks / used) if used else 1
    return (limit_gib if math.isfinite(limit_gib) else device_gib) / sharing
