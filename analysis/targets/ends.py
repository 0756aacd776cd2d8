"""Curves cut into runs, and how each run ended."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.targets.curves import IDENTITY

__all__ = ["Runs", "cut", "diverged_runs", "last_losses"]


class Runs(NamedTuple):
    """Curves cut into runs: row numbers, one of each a run."""

    start: NDArray[np.int64]
    last: NDArray[np.int64]


def cut(curves: pd.DataFrame) -> Runs:
    """Find where each run begins and ends in a tidy table of curves."""
    start = np.flatnonzero(curves["run"].ne(curves["run"].shift()).to_numpy(dtype=bool))
    last = np.append(start[1:], len(curves)) - 1
    return Runs(start, last)


def diverged_runs(curves: pd.DataFrame, runs: Runs) -> NDArray[np.bool_]:
    """Tell which runs diverged, by status or because a last loss after training is not finite."""
    last = curves.iloc[runs.last]
    lost = ~np.isfinite(last["loss"].to_numpy(dtype=float)) & (last["optimizer_step"] > 0)
    found: NDArray[np.bool_] = (last["status"].eq("diverged") | lost).to_numpy(dtype=bool)
    return found


def last_losses(curves: pd.DataFrame) -> pd.DataFrame:
    """Return the last loss of each run; infinite where it diverged, NaN without measurements.

    Parameters
    ----------
    curves : DataFrame
        Tidy, as `tidy_curves` returns them.

    Returns
    -------
    DataFrame
        One row a run: what it is, `final_loss` and `settled_loss`, the highest loss that it
        had after its first two measurements (-inf where there are no more).
    """
    runs = cut(curves)
    loss = curves["loss"].to_numpy(dtype=float)
    found = curves.loc[runs.last, [name for name in IDENTITY if name in curves]]
    settled = loss.copy()
    settled[runs.start] = settled[np.minimum(runs.start + 1, runs.last)] = -np.inf
    last = np.where(diverged_runs(curves, runs), np.inf, loss[runs.last])
    highest = np.fmax.reduceat(settled, runs.start)
    return found.assign(final_loss=last, settled_loss=highest).reset_index(drop=True)
