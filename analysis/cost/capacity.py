"""The memory of a rank, and the peak that is compared with it."""

from __future__ import annotations

import math
from collections.abc import Sized

import numpy as np
import pandas as pd

from batchscape.analysis.cost.table import MEMORY_PHASES
from batchscape.analysis.joins import column_of

LIMITED = "memory_limit_gib"
"""Column of a limit that emulates a smaller device."""

_HOST = "environment.memory_gib"
_DEVICE = "launch.device_memory_gib"
PEAK_FIGURES = {
    "peak_taken_gib": "private memory mapped above the start, tensors and all else",
    **{name: MEMORY_PHASES[name] for name in ("device_used_gib", "peak_reserved_gib")},
    "peak_allocated_gib": "tensors alone, so that the margin is an upper bound",
}
"""Figures of a peak in order of preference, and their labels."""


def memory_of_ranks(runs: pd.DataFrame) -> pd.Series[float]:
    """Return the memory that each rank of a run had, in GiB; NaN where it is unknown."""
    ranks, limit, host, device = (
        _numbers(runs, name) for name in ("data_parallel_size", LIMITED, _HOST, _DEVICE)
    )
    devices = column_of(runs, "launch.devices").map(
        lambda names: len(names) if isinstance(names, Sized) and not isinstance(names, str) else 0
    )
    ranks_a_device = (ranks / devices.where(devices > 0)).apply(np.ceil).fillna(1)
    # A device of a CPU is one rank, so a limit is already a rank's.
    memory: pd.Series[float] = (limit.fillna(device) / ranks_a_device).where(
        column_of(runs, "device_type").ne("cpu"), limit.fillna(host / ranks)
    )
    return memory.mask(_numbers(runs, "launch.runs_per_device").gt(1) & limit.isna())


def device_memory(runs: pd.DataFrame) -> float:
    """Return the memory of each device of runs on equal ones, in GiB; NaN where it is unknown."""
    limits = _numbers(runs, LIMITED)
    if limits.notna().any():
        return float(limits.iloc[0]) if limits.nunique(dropna=False) == 1 else math.nan
    return float(_numbers(runs, _DEVICE).min())


def peaks_of_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the figure that decides whether a run fits: `peak_gib`, and its name `peak_figure`."""
    figures = pd.DataFrame({name: _numbers(runs, name) for name in PEAK_FIGURES})
    is_limited = column_of(runs, LIMITED).notna()
    figures["device_used_gib"] = figures["device_used_gib"].mask(is_limited)
    peak = figures.bfill(axis=1).iloc[:, 0]
    name = figures.notna().idxmax(axis=1).astype(object).where(peak.notna(), None)
    return pd.DataFrame({"peak_gib": peak, "peak_figure": name})


def _numbers(runs: pd.DataFrame, name: str) -> pd.Series[float]:
    return pd.to_numeric(column_of(runs, name)).astype(float)
