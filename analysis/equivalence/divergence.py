"""How the losses of two decompositions with the same seed move apart over a training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import t

from batchscape.analysis.estimates import LEVEL
from batchscape.errors import AnalysisError

__all__ = ["growth_of_differences"]

_SHARE = 0.1
"""Of the optimizer steps, at either end, that the early and late differences are taken over."""


def growth_of_differences(pairs: pd.DataFrame, beyond: float) -> pd.DataFrame:
    """Compute how the difference of the training loss grows with the optimizer step.

    Parameters
    ----------
    pairs : DataFrame
        As `loss_differences` returns them: `cell`, `trajectory_id`, `optimizer_step`,
        `difference`.
    beyond : float
        Absolute difference, in the unit of the loss, whose first occurrence is looked for.

    Returns
    -------
    DataFrame
        Indexed by `cell`: `early_rms` and `late_rms` (root mean square of the difference over the
        first and last tenth of the optimizer steps, over all trajectories), `beyond`,
        `first_step_beyond` (the earliest in any trajectory; NaN: never), `n_beyond`
        (trajectories in which there is one), `growth_rate` (slope of log |difference| over the
        optimizer step, mean over trajectories; what is equal to the last bit is left out),
        `growth_low`, `growth_high` (95 % t-interval over trajectories), `n_trajectories`.

    Raises
    ------
    AnalysisError
        If a column is missing, or `beyond` is not positive.
    """
    needed = {"cell", "trajectory_id", "optimizer_step", "difference"}
    if missing := needed - set(pairs.columns):
        msg = f"paired losses lack columns: {', '.join(sorted(missing))}"
        raise AnalysisError(msg)
    if not 0 < beyond < math.inf:
        msg = f"a difference to look for must be above 0 and finite, got {beyond=}"
        raise AnalysisError(msg)
    rows = pairs[["cell", "optimizer_step", "difference"]].assign(
        trajectory=pd.factorize(pairs["trajectory_id"])[0]
    )
    rows = rows[rows["difference"].notna()].reset_index(drop=True)
    step, size = rows["optimizer_step"].astype(float), rows["difference"].abs().astype(float)
    last = step.groupby(rows["cell"]).transform("max")
    square = size**2
    table = pd.DataFrame(
        {
            "early_rms": _rms(square[step <= _SHARE * last], rows["cell"]),
            "late_rms": _rms(square[step > (1 - _SHARE) * last], rows["cell"]),
            "beyond": beyond,
        },
        index=pd.Index(sorted(rows["cell"].unique()), name="cell"),
    )
    passed = rows[size > beyond].groupby(["cell", "trajectory"])["optimizer_step"].min()
    table["first_step_beyond"] = passed.groupby("cell").min().reindex(table.index).astype(float)
    table["n_beyond"] = passed.groupby("cell").size().reindex(table.index, fill_value=0)
    table = table.join(_growth(_slopes(rows, step, size)))
    table["n_trajectories"] = rows.groupby("cell")["trajectory"].nunique()
    return table


def _rms(square: pd.Series[float], cell: pd.Series[int]) -> pd.Series[float]:
    return square.groupby(cell).mean() ** 0.5


def _slopes(rows: pd.DataFrame, step: pd.Series[float], size: pd.Series[float]) -> pd.Series[float]:
    """Fit log |difference| by a line, for each cell and trajectory; NaN for a single point."""
    number = rows.groupby(["cell", "trajectory"], sort=False).ngroup().to_numpy()
    every = pd.MultiIndex.from_frame(rows[["cell", "trajectory"]].drop_duplicates())
    steps, sizes = step.to_numpy(), size.to_numpy()
    kept = np.isfinite(sizes) & (sizes > 0)
    curve, x, y = number[kept], steps[kept], np.log(sizes[kept])

    def sums(values: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        return np.bincount(curve, weights=values, minlength=len(every)).astype(float)

    x = x - (sums(x) / np.maximum(np.bincount(curve, minlength=len(every)), 1))[curve]
    xy, xx = sums(x * y), sums(x * x)
    slopes = np.divide(xy, xx, out=np.full(len(every), math.nan), where=xx > 0)
    return pd.Series(slopes, index=every)


def _growth(slopes: pd.Series[float]) -> pd.DataFrame:
    """Average the slopes of each cell, with their interval."""
    groups = slopes.dropna().groupby("cell")
    mean, n = groups.mean(), groups.count()
    half = groups.std() / n**0.5 * t.ppf((1 + LEVEL) / 2, (n - 1).clip(lower=1))
    return pd.DataFrame(
        {"growth_rate": mean, "growth_low": mean - half, "growth_high": mean + half}
    )
