"""How the losses of two decompositions with the same seed move apart over a training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.estimates import half_widths

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
    """
    pairs = pairs.dropna(subset=["difference"])
    step = pairs["optimizer_step"].to_numpy(dtype=float)
    size = pairs["difference"].abs().to_numpy(dtype=float)
    cell, names = pd.factorize(pairs["cell"], sort=True)
    trajectory, trajectories = pd.factorize(pairs["trajectory_id"], use_na_sentinel=False)
    # Millions of rows: a curve, of one cell and trajectory, is told by one number.
    curve, curves = pd.factorize(cell * len(trajectories) + trajectory)
    cell_of = curves // max(len(trajectories), 1)
    last = pd.Series(step).groupby(cell).max().to_numpy()[cell]
    early, late = step <= _SHARE * last, step > (1 - _SHARE) * last
    table = pd.DataFrame(
        {
            "early_rms": _rms(size[early], cell[early], len(names)),
            "late_rms": _rms(size[late], cell[late], len(names)),
            "beyond": beyond,
        },
        index=pd.Index(names, name="cell"),
    )
    passed = pd.Series(step[size > beyond]).groupby(curve[size > beyond]).min()
    firsts = passed.groupby(names[cell_of[passed.index]])
    table["first_step_beyond"] = firsts.min().reindex(table.index)
    table["n_beyond"] = firsts.size().reindex(table.index, fill_value=0)
    slopes = _slopes(curve, step, size, len(curves))
    table = table.join(_growth(pd.Series(slopes, index=table.index[cell_of])))
    table["n_trajectories"] = np.bincount(cell_of, minlength=len(names))
    return table


def _rms(size: NDArray[np.float64], cell: NDArray[np.int64], n_cells: int) -> NDArray[np.float64]:
    """Root mean square for each cell; NaN for one without a value."""
    counts = np.bincount(cell, minlength=n_cells)
    with np.errstate(over="ignore"):
        square = size**2
    return np.sqrt(_ratio(np.bincount(cell, square, n_cells), counts))


def _slopes(
    curve: NDArray[np.int64],
    step: NDArray[np.float64],
    size: NDArray[np.float64],
    n_curves: int,
) -> NDArray[np.float64]:
    """Fit log |difference| by a line for each curve; NaN for a single point."""
    kept = np.isfinite(size) & (size > 0)
    curve, x, y = curve[kept], step[kept], np.log(size[kept])
    x = x - _ratio(np.bincount(curve, x, n_curves), np.bincount(curve, minlength=n_curves))[curve]
    return _ratio(np.bincount(curve, x * y, n_curves), np.bincount(curve, x * x, n_curves))


def _ratio(above: NDArray[Any], below: NDArray[Any]) -> NDArray[np.float64]:
    ratio = np.full(len(below), math.nan)
    np.divide(above, below, out=ratio, where=below > 0)
    return ratio


def _growth(slopes: pd.Series[float]) -> pd.DataFrame:
    """Average the slopes of each cell, with their interval."""
    groups = slopes.dropna().groupby("cell")
    mean, n = groups.mean(), groups.count()
    half = half_widths(groups.std(), n)
    return pd.DataFrame(
        {"growth_rate": mean, "growth_low": mean - half, "growth_high": mean + half}
    )
