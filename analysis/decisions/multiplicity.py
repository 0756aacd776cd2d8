"""The quantile of intervals that hold for all pairs of several means at once."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import chdtri, ndtr

from batchscape.analysis.estimates import LEVEL

if TYPE_CHECKING:
    from scipy.interpolate import CubicSpline

_DEGREES = np.array([1.0, 1.4, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0, 60.0, np.inf])
"""Where the quantile is computed; between them a spline in 1/degrees errs by less than 0.1 %."""
_FARTHEST = 9.0
"""Standard deviations of a mean beyond which none lies."""

Floats = npt.NDArray[np.float64]


def pair_quantile(k: int, degrees: npt.ArrayLike) -> Floats:
    """Return the quantile for the difference of any two of k means, whichever the data choose.

    It takes the place of Student's t in the interval of a difference, and holds for all pairs at
    once, so also for the largest mean against the smallest. With two means it is Student's t.

    Parameters
    ----------
    k : int
        Means among which the pair was chosen, 2 at least.
    degrees : array-like of float
        Degrees of freedom of the variance of each difference; NaN or below 1: no quantile.

    Returns
    -------
    array of float
        Of the shape of `degrees`: the `LEVEL` quantile of the studentized range over the root of 2.

    Notes
    -----
    With Welch's degrees of freedom for each pair these are the intervals of Games and Howell
    (1976), "Pairwise multiple comparison procedures with unequal n's and/or variances".
    """
    freedom = np.asarray(degrees, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = 1 / np.where(freedom >= 1, freedom, np.nan)
    return np.asarray(np.exp(_log_quantile(k)(inverse)), dtype=np.float64)


@lru_cache
def _log_quantile(k: int) -> CubicSpline:
    """Return the logarithm of the quantile over 1/degrees."""
    # Most reports need none, and need not wait for it.
    from scipy.interpolate import CubicSpline

    z, at_z = np.polynomial.legendre.leggauss(96)
    u, at_u = np.polynomial.legendre.leggauss(96)
    z, at_z = (
        _FARTHEST * z,
        _FARTHEST * at_z * np.exp(-((_FARTHEST * z) ** 2) / 2) / np.sqrt(2 * np.pi),
    )
    # Lower tails u of chi square; squares of nodes put more of them where the spread is small.
    u, at_u = ((u + 1) / 2) ** 2, at_u * (u + 1) / 2

    def coverage(log_q: float, spread: Floats, weights: Floats) -> float:
        width = np.sqrt(2) * np.exp(log_q) * spread[:, None]
        within = k * (ndtr(z + width) - ndtr(z)) ** (k - 1) @ at_z
        return float(weights @ within) - LEVEL

    quantiles = []
    for degrees in _DEGREES:
        if np.isinf(degrees):
            spread, weights = np.ones(1), np.ones(1)
        else:
            spread, weights = np.sqrt(chdtri(degrees, 1 - u) / degrees), at_u
        quantiles.append(brentq(coverage, -1.0, 6.0, args=(spread, weights), xtol=1e-9))
    return CubicSpline(1 / _DEGREES[::-1], quantiles[::-1])
