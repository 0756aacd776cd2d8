"""Curves cut into runs: when each met a loss, and how it ended."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.targets.curves import IDENTITY

TO_TARGET = {
    "steps_to_target": "optimizer_step",
    "samples_to_target": "samples",
    "tokens_to_target": "tokens",
    "time_to_target_s": "train_time_s",
}
"""Columns of what it took, and the columns of progress that they count."""


Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Places = NDArray[np.int64]


class RunRows(NamedTuple):
    """Curves cut into runs: row numbers, one of each a run."""

    start: Places
    last: Places


def find_run_rows(curves: pd.DataFrame) -> RunRows:
    """Find where each run begins and ends in a tidy table of curves."""
    start = np.flatnonzero(curves["run"].ne(curves["run"].shift()).to_numpy(dtype=bool))
    last = np.append(start[1:], len(curves)) - 1
    return RunRows(start, last)


def diverged_runs(curves: pd.DataFrame, runs: RunRows) -> Flags:
    """Tell which runs diverged, by status or because a last loss after training is not finite."""
    last = curves.iloc[runs.last]
    lost = ~np.isfinite(last["loss"].to_numpy(dtype=float)) & (last["optimizer_step"] > 0)
    is_diverged: Flags = (last["status"].eq("diverged") | lost).to_numpy(dtype=bool)
    return is_diverged


def crossing_rows(met: Flags, runs: RunRows) -> tuple[Places, Places, dict[str, Places]]:
    """Find the rows of both crossings of each run, past its last where there is none.

    Also count, for each kind, the rows right after it that meet the target too.
    """
    below, above = np.flatnonzero(met), np.flatnonzero(~met)
    first = np.append(below, len(met))[np.searchsorted(below, runs.start)]
    first = np.where(first <= runs.last, first, runs.last + 1)
    back = np.searchsorted(above, runs.last, side="right")
    last_above = np.insert(above, 0, -1)[back]
    sustained = np.maximum(last_above + 1, runs.start)
    broken = np.append(above, len(met))[np.searchsorted(above, first)]
    confirmed = {
        "first": np.minimum(broken, runs.last + 1) - first - 1,
        "sustained": runs.last - sustained,
    }
    return first, sustained, confirmed


def progress_at(
    curves: pd.DataFrame, upper: Places, is_first: Flags, target: float
) -> dict[str, Floats]:
    """Read all progress at the crossing between row `upper` and the one before, run by run."""
    lower = np.where(is_first, upper, upper - 1)
    loss = curves["loss"].to_numpy(dtype=float)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (loss[lower] - target) / (loss[lower] - loss[upper])
        usable = np.isfinite(share) & np.isfinite(loss[lower]) & ~is_first
        share = np.where(usable, np.clip(share, 0.0, 1.0), 1.0)
        samples = curves["samples"].to_numpy(dtype=float)
        low, high = samples[lower], samples[upper]
        geometric = low * (high / low) ** share
        # From here on linear: w is the share of the bracket's samples.
        weight = np.where((low > 0) & (high > low), (geometric - low) / (high - low), share)
    values = {}
    for name, progress in TO_TARGET.items():
        column = curves[progress].to_numpy(dtype=float)
        between = column[lower] + weight * (column[upper] - column[lower])
        # A rounding beyond the bracket would contradict it.
        values[name] = np.clip(between, column[lower], column[upper])
    return values


def steps_at(curves: pd.DataFrame, rows: Places, runs: RunRows, target: float) -> Floats:
    """Read the optimizer steps at the crossing before each of these rows; NaN past a run's last."""
    upper = np.minimum(rows, runs.last)
    steps = progress_at(curves, upper, upper == runs.start, target)["steps_to_target"]
    return np.where(rows <= runs.last, steps, np.nan)


def last_losses(curves: pd.DataFrame) -> pd.DataFrame:
    """Return one row a run with its last loss (inf: diverged) and its highest settled one."""
    runs = find_run_rows(curves)
    loss = curves["loss"].to_numpy(dtype=float)
    identity = curves.loc[runs.last, [name for name in IDENTITY if name in curves]]
    settled = loss.copy()
    settled[runs.start] = settled[np.minimum(runs.start + 1, runs.last)] = -np.inf
    last = np.where(diverged_runs(curves, runs), np.inf, loss[runs.last])
    highest = np.fmax.reduceat(settled, runs.start)
    return identity.assign(final_loss=last, settled_loss=highest).reset_index(drop=True)
