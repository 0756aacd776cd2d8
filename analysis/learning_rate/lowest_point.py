"""Where a cost is lowest in the learning rate: between the points of a grid, with an interval.

Costs are averaged over seeds at every learning rate, and a parabola in log learning rate is laid
through the best one and its neighbours (by weighted least squares where the grid is finer than a
factor of 3.2). Its lowest point is the estimate. Seeds are paired: a seed that trains worse at
every rate moves no optimum.

The interval is Fieller's for the ratio -b / (2 c) of the parabola's coefficients over seeds, with
n - 1 degrees of freedom: all points at which the mean slope is compatible with zero. A curve is no
parabola: it mostly rises faster above its lowest point than below it. So two other shapes are laid
through the same means, a parabola of exp(-cost) in the learning rate itself (exact for the noisy
quadratic of McCandlish et al. 2018, where the gain of a step is one) and a cubic through four or
more rates. On the side where their lowest points lie, 1.5 times the larger distance is added to the
interval, as the root of the sum of squares: a coarse grid has no finer answer than that.

Where the mean curvature itself is compatible with zero Fieller's set has no ends; then the ends are
the nearest rates that are worse, by a paired t-test, than the best one. They bound the optimum of
every curve that falls and then rises. A rate at which a run diverged or missed its target is worse
than all others; where such a rate is the neighbour of the best, no parabola is laid.

Source: Fieller 1954, Journal of the Royal Statistical Society B 16, p. 175. Tuning each batch by
itself and flagging optima at the edge: Shallue et al. 2019, arXiv:1811.03600, section 4.

Notes
-----
Coverage at 95 % in 400 simulated sweeps of six batches (`test_coverage.py`), lowest and highest of
3, 5 and 10 seeds, without and with a shift of the optimum that a seed has in all batches:

============================================ ==============
parabola, noise 0.2, grid of a factor of 1.4 97.6 to 98.1 %
parabola, noise 0.1, grid of a factor of 2   97.0 to 98.3 %
exp(x) - x, noise 0.1, factor of 2           98.5 to 99.3 %
noisy quadratic, noise 0.1, factor of 2      99.4 to 100 %
============================================ ==============

The last curve has a wall: at twice the best rate it diverges. There the coarse grid bounds the
optimum, not the seeds, and the interval holds it nearly always. With the cubic as the
only other shape 70 such sweeps a case held it in 36 to 98 %.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from batchscape.analysis.estimates import LEVEL, NOT_IDENTIFIED

__all__ = ["Optimum", "optimum_of"]

_REACH = math.log(3.2)
"""Half-width of the parabola's window where the grid is finer: 3.2 is the coarse grid of 1 and 3
an order of magnitude."""

_MARGIN = 1.5
"""Times the distance between the shapes that were tried: the curve's own may lie beyond them."""


class Optimum(NamedTuple):
    """Where a cost is lowest, in the units of the points given."""

    best: int
    """Position of the best point; -1 where no point has a finite cost."""
    value: float
    """NaN where it is not identified."""
    low: float
    high: float
    method: str
    note: str | None


def optimum_of(points: NDArray[np.float64], costs: NDArray[np.float64]) -> Optimum:
    """Estimate where a cost is lowest.

    Parameters
    ----------
    points : array, shape (k,)
        Logarithms of the learning rates, ascending.
    costs : array, shape (n, k)
        Cost of each seed at each point; infinite where a run diverged or missed its target.

    Returns
    -------
    Optimum
        In logarithms of the learning rate; ends are infinite where there are none.
    """
    n = len(costs)
    mean = costs.mean(axis=0)
    if not np.isfinite(mean).any():
        reason = f"{NOT_IDENTIFIED}: at no learning rate did every seed get there"
        return Optimum(-1, math.nan, -math.inf, math.inf, "none", reason)
    best = int(np.argmin(mean))
    ends = _bracket(points, costs, best)
    if best in {0, len(points) - 1}:
        return _at_edge(points, best, n, ends)
    left, right = _window(points, mean, best)
    if best in {left, right}:
        lost = "a neighbour diverged or missed the target: the best rate of the grid"
        low, high = max(ends[0], points[best - 1]), min(ends[1], points[best + 1])
        return Optimum(best, points[best], low, high, f"neighbours that are worse, {n} seeds", lost)
    centred, own = points[left : right + 1] - points[best], costs[:, left : right + 1]
    coefficients = _parabolas(centred, own)
    _, slope, curvature = coefficients.mean(axis=0)
    # A wide window may hold no lowest point; then the best point itself is the estimate.
    vertex = -slope / (2 * curvature) if curvature > 0 else 0.0
    value = float(np.clip(vertex, centred[0], centred[-1]))
    if n == 1:
        return Optimum(best, points[best] + value, math.nan, math.nan, "one seed", None)
    low, high = _fieller(coefficients[:, 1], 2 * coefficients[:, 2])
    if math.isinf(low):
        flat = "the curvature is compatible with zero"
        method = f"neighbours that are worse, paired t over {n} seeds"
        return Optimum(best, points[best] + value, *ends, method, flat)
    doubt, note = _doubt(points, mean, (left, right), best, value)
    low = value - math.hypot(value - low, doubt[0])
    high = value + math.hypot(high - value, doubt[1])
    low, high = points[best] + low, points[best] + high
    return Optimum(best, points[best] + value, low, high, f"Fieller over {n} seeds", note)


def _at_edge(points: NDArray[np.float64], best: int, n: int, ends: tuple[float, float]) -> Optimum:
    """Say only on which side of the grid the optimum may lie."""
    side = "at most" if best == 0 else "at least"
    inner = points[1] if best == 0 else points[-2]
    sure = ends[1] <= inner if best == 0 else ends[0] >= inner
    bound = f"{side} {math.exp(inner):.3g}" if sure else "beyond or near it"
    place = "lowest" if best == 0 else "highest"
    reason = f"{NOT_IDENTIFIED}: the {place} learning rate of the grid is the best, {bound}"
    return Optimum(best, math.nan, *ends, f"paired t over {n} seeds", reason)


def _window(points: NDArray[np.float64], mean: NDArray[np.float64], best: int) -> tuple[int, int]:
    """Return first and last point of the parabola: neighbours, and further ones of a fine grid."""
    usable = np.isfinite(mean) & (np.abs(points - points[best]) <= _REACH)
    usable[[best - 1, best + 1]] = np.isfinite(mean[[best - 1, best + 1]])
    left = right = best
    while left > 0 and usable[left - 1]:
        left -= 1
    while right < len(points) - 1 and usable[right + 1]:
        right += 1
    return left, right


def _parabolas(centred: NDArray[np.float64], costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit each seed's parabola; coefficients of 1, x and x^2, shape (n, 3)."""
    # Far points weigh less, for no curve is a parabola far from its lowest point.
    weights = np.sqrt(1 - 0.75 * (centred / np.abs(centred).max()) ** 2)
    design = np.vander(centred, 3, increasing=True) * weights[:, None]
    found: NDArray[np.float64] = (np.linalg.pinv(design) @ (costs * weights).T).T
    return found


def _fieller(slopes: NDArray[np.float64], curvatures: NDArray[np.float64]) -> tuple[float, float]:
    """Return all x at which the mean of slope + x curvature is compatible with zero."""
    n = len(slopes)
    t = float(stats.t.ppf((1 + LEVEL) / 2, n - 1))
    covariance = np.cov(slopes, curvatures) / n
    means = np.array([slopes.mean(), curvatures.mean()])
    (c, b), (_, a) = np.outer(means, means) - t * t * covariance
    if a <= 0 or curvatures.mean() <= 0:
        return -math.inf, math.inf
    root = math.sqrt(max(b * b - a * c, 0.0))
    return (-b - root) / a, (-b + root) / a


def _doubt(
    points: NDArray[np.float64],
    mean: NDArray[np.float64],
    window: tuple[int, int],
    best: int,
    vertex: float,
) -> tuple[tuple[float, float], str | None]:
    """Return how far below and above the parabola's other shapes put the lowest point."""
    left, right = window
    centred = points - points[best]
    own = np.exp(centred[left : right + 1])
    gains = np.exp(mean[best] - mean[left : right + 1])
    _, slope, curvature = _parabolas(own - 1, gains[None])[0]
    top = 1 - slope / (2 * curvature) if curvature < 0 else 1.0
    others = [math.log(min(max(top, own[0]), own[-1]))]
    outer = [i for i in (left - 1, right + 1) if 0 <= i < len(points) and np.isfinite(mean[i])]
    note = None
    if right - left + len(outer) < 3:
        note = "only three usable rates: the asymmetry of the curve is not seen"
    else:
        near = [*range(left, right + 1), *outer]
        # Points outside the parabola's window shall decide the cubic term and nothing else.
        weights = np.where(np.isin(near, outer), 0.1, 1.0)
        cubic = np.polynomial.Polynomial.fit(centred[near], mean[near], 3, w=weights)
        roots = [complex(root) for root in np.atleast_1d(cubic.deriv().roots())]
        others += [
            root.real
            for root in roots
            if abs(root.imag) < 1e-9
            and centred[left] <= root.real <= centred[right]
            and float(cubic.deriv(2)(root.real)) > 0
        ]
    below, above = max(0.0, vertex - min(others)), max(0.0, max(others) - vertex)
    return (_MARGIN * below, _MARGIN * above), note


def _bracket(
    points: NDArray[np.float64], costs: NDArray[np.float64], best: int
) -> tuple[float, float]:
    """Return the nearest points below and above that are worse than the best one."""
    worse = _worse(costs, best)
    below, above = np.flatnonzero(worse[:best]), np.flatnonzero(worse[best + 1 :])
    low = points[below[-1]] if len(below) else -math.inf
    high = points[best + 1 + above[0]] if len(above) else math.inf
    return float(low), float(high)


def _worse(costs: NDArray[np.float64], best: int) -> NDArray[np.bool_]:
    """Tell at which points the cost is above that at the best, by a paired t-test."""
    n = len(costs)
    lost = np.isinf(costs)
    if n == 1:
        alone: NDArray[np.bool_] = lost[0]
        return alone
    with np.errstate(invalid="ignore"):
        difference = np.where(lost, 0.0, costs - costs[:, [best]])
    error = difference.std(axis=0, ddof=1) / math.sqrt(n)
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, n - 1))
    apart = difference.mean(axis=0) > quantile * error
    worse: NDArray[np.bool_] = np.where(lost.any(axis=0), lost.mean(axis=0) >= 0.5, apart)
    return worse
