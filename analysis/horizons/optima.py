"""Global batch and learning rate that are best together, by horizon, and their exponents in it.

A horizon is the number of samples after which a training ends, with its schedule. The logarithm of
the final held-out loss is fitted, by least squares in each seed, by a quadratic form in log rate
and log batch. Its curvature is shared by all horizons; a constant and the linear terms belong to
each. The logarithm is taken for the sake of that curvature: a loss that is a tenth as large changes
by a tenth as much. The lowest point of the coefficients' mean over seeds is the optimum of a
horizon, the slope of its coordinates over the logarithm of the horizon is their exponent.

No surface is quadratic far from its lowest point: of each horizon the better two thirds of its
cells count, by their mean over seeds; a cell in which a run diverged is worse than all others. An
optimum is not identified where the curvature is not positive definite, with all seeds and without
any one of them, or where it does not lie within the cells in which no run diverged: so no fit
reaches beyond a wall of divergence. Whether the form fits is told by an F test of the residuals of
the mean against the scatter of the seeds about it.

Values and intervals are those of the jackknife over seeds: horizons are decays of one trunk, or
begin on the same samples, so that within a seed their losses are correlated.

Source: rate and batch tuned together, and published exponents: Li et al. 2025 (StepLaw), arXiv
2503.04715; Bergsma et al. 2025, arXiv 2505.13738. Delete-one jackknife: Efron and Stein 1981,
Annals of Statistics 9, p. 586.

Notes
-----
How often the intervals of both exponents hold the truth at 95 %, and the test of fit has p < 0.05,
of 300 sweeps of four horizons, five batches and five rates. Log losses have noise of 0.08; horizons
of one trunk share a part of its variance. x is the logarithm of the rate over the best one.

====================================== ===== ==== ========
case                                   batch rate p < 0.05
====================================== ===== ==== ========
3 seeds, nothing shared                94 %  96 %  6 %
3 seeds, 0.8 shared                    94 %  97 % 11 %
4 seeds, nothing shared                94 %  96 %  4 %
4 seeds, 0.8 shared                    93 %  97 % 14 %
8 seeds, nothing shared                95 %  95 %  3 %
4 seeds, noise of 0.2                  94 %  96 %  4 %
4 seeds, all diverge from x = 0.4 on   97 %  93 %  4 %
4 seeds, e^x - x for x^2/2, noise 0.02 94 %  82 % 100 %
====================================== ===== ==== ========

The test takes cells for independent: where horizons share much, it rejects too often. The last row
is what it is there for. `test_optima.py` repeats a part of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import fdtrc

from batchscape.analysis.estimates import Estimate
from batchscape.errors import AnalysisError

NAMES = {"global_batch_size": "global batch (samples)", "learning_rate": "learning rate"}
"""The coordinates of an optimum."""

PUBLISHED = {
    "global_batch_size": {0.383: "Bergsma et al. 2025", 0.571: "Li et al. 2025"},
    "learning_rate": {0.307: "Li et al. 2025"},
}
"""Exponents in the number of tokens, by coordinate: of language models of one size."""

_BETTER = 2 / 3
"""Share of the cells that count."""
_FLOATS = NDArray[np.float64]


@dataclass(frozen=True)
class JointOptima:
    """Where the final loss is lowest in batch and rate together."""

    optima: dict[str, dict[float, Estimate]]
    """By coordinate and horizon, in order."""
    exponents: dict[str, Estimate]
    """In the horizon, by coordinate; empty with one horizon."""
    lack_of_fit_p: float
    """NaN where it cannot be told."""


def joint_optima(costs: pd.DataFrame) -> JointOptima:
    """Estimate the best batch and rate of every horizon, and their exponents.

    Parameters
    ----------
    costs : DataFrame
        One row a run: `horizon`, `global_batch_size`, `learning_rate`, `seed`, `cost` (its final
        loss; infinite: it diverged). Cells count that half of the seeds ran, and seeds that ran all
        of these.

    Raises
    ------
    AnalysisError
        If no seed did, or a loss is not above 0.
    """
    losses = costs.pivot(index="seed", columns=["horizon", *NAMES], values="cost")
    losses = losses.loc[:, losses.notna().mean() >= 0.5].dropna()
    if losses.empty or (losses <= 0).any(axis=None):
        raise AnalysisError(
            "batch and rate are fitted together to losses above 0 of seeds that ran at every batch "
            "and rate that half of the seeds ran at: there are none"
        )
    logs = np.log(losses.to_numpy(dtype=float))
    cells = losses.columns.to_frame(index=False).assign(log_loss=logs.mean(axis=0))
    by_horizon = cells.groupby("horizon")["log_loss"]
    most = np.ceil(_BETTER * by_horizon.transform("size"))
    is_finite = np.isfinite(cells["log_loss"])
    cells["is_fitted"] = is_finite & (by_horizon.rank(method="first") <= most)
    fits, lack_of_fit_p = _fits(cells, logs[:, cells["is_fitted"]])
    n, horizons = len(fits), np.unique(cells["horizon"])
    without = (fits.sum(axis=0) - fits) / (n - 1) if n > 1 else fits
    means = np.vstack([fits.mean(axis=0), without])
    curvatures = means[:, [-3, -2, -2, -1]].reshape(-1, 2, 2)
    # Shape (all seeds and without each, coordinates, horizons).
    centres = -np.linalg.pinv(curvatures) @ means[:, len(horizons) : -3].reshape(n + 1, 2, -1)
    if np.linalg.eigvalsh(curvatures).min() <= 1e-9:
        centres[:] = math.nan
    places = np.log(cells[list(NAMES)].to_numpy(dtype=float))
    # The jackknife's own value, too, must lie within: few seeds may move it far.
    corrected = n * centres[0] - (n - 1) * centres[1:].mean(axis=0)
    is_found = [
        all(_is_inside(c, places[is_finite & (cells["horizon"] == horizon)]) for c in pair)
        for *pair, horizon in zip(centres[0].T, corrected.T, horizons, strict=True)
    ]
    few = "it takes three horizons with an optimum" * (sum(is_found) < 3)
    optima, exponents = {}, {}
    for (name, text), centre in zip(NAMES.items(), centres.swapaxes(0, 1), strict=True):
        optima[name] = {
            horizon: _estimate(
                values,
                f"best {text}{f' after {horizon:g} samples' * math.isfinite(horizon)}, batch and "
                "rate chosen together",
                "no lowest point of the fit within the grid, short of divergence" * (not is_one),
                is_log=True,
            )
            for horizon, values, is_one in zip(horizons, centre.T, is_found, strict=True)
        }
        x, y = np.log(horizons[is_found]), centre[:, is_found].T
        slopes = centre[:, 0] if few else np.polyfit(x, y, 1)[0]
        exponents[name] = _estimate(slopes, f"exponent of the best {text} in the horizon", few)
    exponents = exponents if len(horizons) > 1 else {}
    return JointOptima(optima, exponents, lack_of_fit_p)


def _fits(cells: pd.DataFrame, logs: _FLOATS) -> tuple[_FLOATS, float]:
    """Fit a surface to each seed, and test whether residuals are larger than seeds scatter."""
    fitted = cells[cells["is_fitted"]]
    x, y = np.log(fitted[list(NAMES)].to_numpy(dtype=float)).T[:, :, None]
    is_of_horizon = np.equal.outer(fitted["horizon"].to_numpy(), np.unique(cells["horizon"]))
    design = np.hstack(
        [is_of_horizon, is_of_horizon * x, is_of_horizon * y, x * x / 2, x * y, y * y / 2]
    )
    fits = logs @ np.linalg.pinv(design).T
    residuals = logs - fits @ design.T
    n, mean = len(logs), residuals.mean(axis=0)
    spare = np.subtract(*design.shape)
    scatter = float(((residuals - mean) ** 2).sum()) or math.nan
    ratio = n * (n - 1) * float(mean @ mean) / scatter
    return fits, float(fdtrc(spare, (n - 1) * spare, ratio))


def _estimate(values: _FLOATS, definition: str, why: str, *, is_log: bool = False) -> Estimate:
    """Estimate by the jackknife, from the value with all seeds and those without each."""
    n = len(values) - 1
    if why:
        return Estimate.unknown(why, n, definition)
    pseudo_values = n * values[0] - (n - 1) * values[1:]
    estimate = Estimate.of_ratio if is_log else Estimate.of_mean
    return estimate(
        pseudo_values, definition, f"jackknife-t over {n} seeds of a quadratic form of the log loss"
    )


def _is_inside(point: _FLOATS, places: _FLOATS) -> bool:
    """Tell whether a point lies within the convex hull of others: seen from it, on all sides."""
    angles = np.sort(np.arctan2(*(places - point).T))
    return len(angles) > 0 and bool(np.diff([*angles, angles[0] + math.tau]).max() < math.pi)
