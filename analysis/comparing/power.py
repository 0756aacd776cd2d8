"""The smallest effect that a comparison detects, given its seeds and their spread."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from scipy import optimize, special

from batchscape.analysis.estimates import t_reach
from batchscape.errors import AnalysisError

ALPHA = 0.05
"""Level of the two-sided test that the smallest effect refers to."""
POWER = 0.80
"""Chance to find an effect of that size."""


def smallest_detectable_effect(
    sd: float, n: int, *, paired: bool = True, power: float = POWER, alpha: float = ALPHA
) -> float:
    """Return the smallest true difference that a two-sided t-test finds with some power.

    Parameters
    ----------
    sd : float
        Standard deviation of the n paired differences, or within each of two groups.
    n : int
        Pairs, or members of each of the two groups.
    paired : bool
        Whether it is a paired test.
    power : float
        Chance to find it, between `alpha` and 1.
    alpha : float
        Level of the test.

    Returns
    -------
    float
        In the unit of `sd`; NaN for fewer than two pairs, or an unknown spread.

    Raises
    ------
    AnalysisError
        If the spread is negative or infinite, or `power` and `alpha` are not in order.

    Notes
    -----
    The noncentrality at which the noncentral t distribution exceeds the critical value with the
    asked chance, times the standard error. Source: Cohen 1988, Statistical Power Analysis,
    chapter 2.
    """
    if not 0 < alpha < power < 1:
        msg = f"alpha must be above 0 and below power, and power below 1; given {alpha=}, {power=}"
        raise AnalysisError(msg)
    if sd < 0 or math.isinf(sd):
        msg = f"a spread must be finite and not negative; given {sd=}"
        raise AnalysisError(msg)
    if n < 2 or math.isnan(sd):
        return math.nan
    degrees = n - 1 if paired else 2 * n - 2
    error = sd / math.sqrt(n) if paired else sd * math.sqrt(2 / n)
    return _noncentrality(degrees, power, alpha) * error


@cache
def _noncentrality(degrees: int, power: float, alpha: float) -> float:
    critical = t_reach(1, degrees, 1 - alpha)

    # Given its scale the noncentral t is normal. Library functions of the noncentral t fail for few
    # degrees of freedom in the tail, so the density of the scale is integrated (Gauss-Legendre).
    nodes, weights = np.polynomial.legendre.leggauss(200)
    scale = (nodes + 1) / 2 * math.sqrt(special.chdtri(degrees, 1e-14) / degrees)
    logs = (degrees - 1) * np.log(scale) - degrees * scale**2 / 2
    density = weights * np.exp(logs - logs.max())
    density = density / density.sum()

    def shortfall(noncentrality: float) -> float:
        reach = critical * scale
        chance = special.ndtr(noncentrality - reach) + special.ndtr(-noncentrality - reach)
        return float(density @ chance) - power

    high = 1.0
    while shortfall(high) < 0:
        high *= 2
    return float(optimize.brentq(shortfall, 0.0, high, xtol=1e-8))
