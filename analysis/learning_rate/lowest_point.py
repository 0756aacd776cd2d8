r"""Where a cost is lowest in the learning rate: between the points of a grid, with an interval.

Costs are averaged over seeds at every learning rate. Through the best rate and its neighbours, and
one more on either side, a parabola is laid in a power of the learning rate: power 0 is a parabola
in its logarithm, 1 one in the rate itself, and higher ones rise the steeper above their lowest
point. The power between -1 and 6 that fits best is taken (by weighted least squares; neighbours are
all rates within a factor of 3.2 where the grid is finer). Its lowest point is the estimate. Seeds
are paired: a seed that trains worse at every rate moves no optimum.

The interval is Fieller's, over seeds with n - 1 degrees of freedom: all points at which the mean
slope is compatible with zero, where each seed has a curve and, as far as it is straight, a power of
its own. What a coarse grid cannot tell is added on either side, as the root of the sum of squares:
as far as the power moved the estimate from that of a parabola in the logarithm, or if that is
farther the distance to another shape, a parabola of exp(-cost) in the rate (exact for the noisy
quadratic of McCandlish et al. 2018, where the gain of a step is one). With three usable rates the
power is not seen: 1/2 is taken, and the lowest points by 0 and 1 widen the interval.

Where the mean curvature itself is compatible with zero Fieller's set has no ends; then the ends are
the nearest rates that are worse, by a paired t-test, than the best one. They bound the optimum of
every curve that falls and then rises. A rate at which a run diverged or missed its target is worse
than all others; where such a rate is the neighbour of the best, no curve is laid. Below three seeds
there is no interval.

Source: Fieller 1954, Journal of the Royal Statistical Society B 16, p. 175; powers of a variable:
Box and Tidwell 1962, Technometrics 4, p. 531. Tuning each batch by itself and flagging optima at
the edge: Shallue et al. 2019, arXiv:1811.03600, section 4.

Notes
-----
Bias of the logarithm, and coverage at 95 %, lowest to highest of four cases (noise of 0.001, 0.05
and 0.2 in the cost, 3 and 5 seeds) of 100 sweeps whose optimum lies anywhere between two rates, on
grids of a factor of 1.4, 2 and 3.2. x is the logarithm of the rate over the best one:

===================================== ====== ============== =============
cost                                  factor bias           coverage
===================================== ====== ============== =============
x^2/2, a parabola in the logarithm    all    0.00 to 0.03   97 to 100 %
(e^x - 1)^2/2, one in the rate itself all    -0.05 to 0.00  100 %
e^x - x                               all    0.00 to 0.06   97 to 100 %
x^2/2 + 20 (x - 0.3)^2 above 0.3:     1.4    -0.01 to 0.03  98 to 100 %
a steep wall                          2      -0.02 to 0.00  87 to 91 %
\                                     3.2    -0.17 to -0.15 97 to 100 %
noisy quadratic, which diverges from  1.4, 2 -0.02 to 0.03  97 to 100 %
x = log 2 on                          3.2    -0.12 to -0.10 91 to 100 %
===================================== ====== ============== =============

A parabola in the logarithm alone, widened likewise, has a bias of -0.24 to -0.16 where the cost is
one in the rate itself and the factor 1.4 or 2, of -0.50 to -0.45 with 3.2, and of -0.28 to -0.21
and -0.54 at the steep wall. `test_coverage.py` repeats a part of this.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from batchscape.analysis.estimates import FEWEST, NOT_IDENTIFIED, TWO_SIDED
from batchscape.text import count_text

_REACH = math.log(3.2)
"""Half-width of the window where the grid is finer: 3.2 is the coarse grid of 1 and 3 an order of
magnitude."""

_POWERS = np.arange(-8, 49) / 8
"""Powers of the learning rate that are tried."""

_UNSEEN = 0.5
"""The power where three rates do not show it."""

_OUTER = 0.3
"""Root of the weight of the rates beyond the window: they show the power more than the place."""

_FLOATS = NDArray[np.float64]


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
    reach: float = math.inf
    """How far from the value the lowest point may lie for all that the grid shows."""


def optimum_of(points: _FLOATS, costs: _FLOATS) -> Optimum:
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
    first, last = _window(points, mean, best)
    if best in {first, last}:
        lost = "a neighbour diverged or missed the target: the best rate of the grid"
        # A rate that loses a run is worse; any other has to be so beyond the noise.
        low = points[best - 1] if np.isinf(mean[best - 1]) else ends[0]
        high = points[best + 1] if np.isinf(mean[best + 1]) else ends[1]
        reach = _reach(points[best], (low, high))
        method = f"neighbours that are worse, {n} seeds"
        return Optimum(best, points[best], low, high, method, lost, reach)
    curve = _curve(points, mean, (first, last), best)
    value = curve.lowest
    if n < FEWEST:
        few = count_text(n, "seed")
        return Optimum(best, points[best] + value, math.nan, math.nan, few, None)
    low, high = _fieller(*curve.slopes(costs))
    if math.isinf(low):
        flat = "the curvature is compatible with zero"
        method = f"neighbours that are worse, paired t over {n} seeds"
        reach = _reach(points[best] + value, ends)
        return Optimum(best, points[best] + value, *ends, method, flat, reach)
    doubt = curve.doubt()
    # A power at the end of its range leaves the mean slope of the seeds' curves a little off zero.
    low = value - math.hypot(max(-low, 0.0), doubt[0])
    high = value + math.hypot(max(high, 0.0), doubt[1])
    low, high = points[best] + low, points[best] + high
    note = None if curve.sees_power else "only three usable rates: the asymmetry is not seen"
    method = f"Fieller over {n} seeds"
    return Optimum(best, points[best] + value, low, high, method, note, max(doubt))


def _reach(value: float, ends: tuple[float, float]) -> float:
    """Return the distance to the farther end."""
    return max(value - ends[0], ends[1] - value)


def _at_edge(points: _FLOATS, best: int, n: int, ends: tuple[float, float]) -> Optimum:
    """Say only on which side of the grid the optimum may lie."""
    side = "at most" if best == 0 else "at least"
    inner = points[1] if best == 0 else points[-2]
    sure = ends[1] <= inner if best == 0 else ends[0] >= inner
    bound = f"{side} {math.exp(inner):.3g}" if sure else "beyond or near it"
    place = "lowest" if best == 0 else "highest"
    reason = f"{NOT_IDENTIFIED}: the {place} learning rate of the grid is the best, {bound}"
    return Optimum(best, math.nan, *ends, f"paired t over {n} seeds", reason)


def _window(points: _FLOATS, mean: _FLOATS, best: int) -> tuple[int, int]:
    """Return first and last point of the parabola: neighbours, and further ones of a fine grid."""
    usable = np.isfinite(mean) & (np.abs(points - points[best]) <= _REACH)
    usable[[best - 1, best + 1]] = np.isfinite(mean[[best - 1, best + 1]])
    first = last = best
    while first > 0 and usable[first - 1]:
        first -= 1
    while last < len(points) - 1 and usable[last + 1]:
        last += 1
    return first, last


class _Curve(NamedTuple):
    """A parabola in a power of the learning rate, laid through mean costs."""

    positions: NDArray[np.int64]
    """Positions of its points."""
    x: _FLOATS
    """Logarithms of their rates over the best one."""
    mean: _FLOATS
    weights: _FLOATS
    inner: NDArray[np.bool_]
    """Which of them are in the window."""
    power: float
    coefficients: _FLOATS
    lowest: float

    @property
    def sees_power(self) -> bool:
        """Whether there are points enough to choose a power."""
        return len(self.x) > 3

    def slopes(self, costs: _FLOATS) -> tuple[_FLOATS, _FLOATS]:
        """Return each seed's slope and curvature at the lowest point, in log learning rate."""
        step = 1e-3
        places = self.lowest + step * np.array([-1.0, 0, 1])
        fits = np.linalg.pinv(self._columns(self.x) * self.weights[:, None])
        seeds = (fits @ (costs[:, self.positions] * self.weights).T).T
        below, at, above = (seeds @ self._columns(places).T).T
        return (above - below) / (2 * step), (above - 2 * at + below) / step**2

    def doubt(self) -> tuple[float, float]:
        """Return how far below and above the lowest point may lie, for all that the grid shows."""
        x, mean, weights = self.x[self.inner], self.mean[self.inner], self.weights[self.inner]
        gains = np.exp(mean.min() - mean)
        span = x[[0, -1]]
        others = _parabolas(x, -gains, weights, np.ones(1), span)[1]
        straight, linear = _parabolas(x, mean, weights, np.array([0.0, 1.0]), span)[1]
        moved = abs(self.lowest - straight)
        if not self.sees_power:
            others = np.append(others, [straight, linear])
        below, above = self.lowest - others.min(), others.max() - self.lowest
        return max(moved, float(below)), max(moved, float(above))

    def _columns(self, x: _FLOATS) -> _FLOATS:
        """Return what a seed's curve is made of: a parabola, and a change of its power."""
        parabola = np.vander(_powered(x, self.power), 3, increasing=True)
        if not self.sees_power:
            return parabola
        step = 1e-4
        other = np.vander(_powered(x, self.power + step), 3, increasing=True)
        return np.column_stack([parabola, (other - parabola) @ self.coefficients / step])


def _curve(points: _FLOATS, mean: _FLOATS, window: tuple[int, int], best: int) -> _Curve:
    """Lay a curve through the window and one usable point beyond it on either side."""
    first, last = window
    beyond = [i for i in (first - 1, last + 1) if 0 <= i < len(points) and np.isfinite(mean[i])]
    positions = np.array(sorted([*range(first, last + 1), *beyond]))
    inner = (positions >= first) & (positions <= last)
    x = points[positions] - points[best]
    # Far points weigh less, for no curve is a parabola far from its lowest point.
    within = np.clip(x / np.abs(x[inner]).max(), -1, 1)
    weights = np.where(inner, np.sqrt(1 - 0.75 * within**2), _OUTER)
    powers = _POWERS if len(positions) > 3 else np.array([_UNSEEN])
    fits = _parabolas(x, mean[positions], weights, powers, x[inner][[0, -1]])
    coefficients, lowest, misfit = fits
    best_fit = int(np.argmin(misfit))
    return _Curve(
        positions=positions,
        x=x,
        mean=mean[positions],
        weights=weights,
        inner=inner,
        power=float(powers[best_fit]),
        coefficients=coefficients[best_fit],
        lowest=float(lowest[best_fit]),
    )


def _parabolas(
    x: _FLOATS, costs: _FLOATS, weights: _FLOATS, powers: _FLOATS, span: _FLOATS
) -> tuple[_FLOATS, _FLOATS, _FLOATS]:
    """Fit a parabola in each power of the rate.

    Returns coefficients, shape (powers, 3), and the lowest point between the ends of a span, and
    the misfit, each shape (powers,).
    """
    design, inverse = _designs(x.tobytes(), weights.tobytes(), powers.tobytes())
    coefficients = inverse @ (costs * weights)
    misfit = ((costs - np.einsum("pki,pi->pk", design, coefficients)) ** 2) @ weights**2
    _, slope, curvature = coefficients.T
    # A wide window may hold no lowest point; then the best point itself is the estimate.
    place = np.divide(-slope, 2 * curvature, out=np.zeros_like(slope), where=curvature > 0)
    low, high = _powered(span[:, None], powers)
    place = np.clip(place, low, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        lowest = np.where(powers == 0, place, np.log1p(powers * place) / powers)
    return coefficients, lowest, misfit


@lru_cache(maxsize=1024)
def _designs(*arrays: bytes) -> tuple[_FLOATS, _FLOATS]:
    """Return the columns of a parabola in each power, and their weighted inverses.

    Most batches of a sweep have the same grid.
    """
    x, weights, powers = map(np.frombuffer, arrays)
    columns = np.vander(_powered(x, powers[:, None]).ravel(), 3, increasing=True)
    design: _FLOATS = columns.reshape(len(powers), len(x), 3)
    return design, np.asarray(np.linalg.pinv(design * weights[:, None]), dtype=np.float64)


def _powered(x: _FLOATS, power: _FLOATS | float) -> _FLOATS:
    """Return (rate^power - 1) / power of log rates, whose limit at power 0 is x."""
    with np.errstate(divide="ignore", invalid="ignore"):
        stretched: _FLOATS = np.where(power == 0, x, np.expm1(power * x) / power)
    return stretched


def _fieller(slopes: _FLOATS, curvatures: _FLOATS) -> tuple[float, float]:
    """Return all x at which the mean of slope + x curvature is compatible with zero."""
    n = len(slopes)
    t = float(stdtrit(n - 1, TWO_SIDED))
    covariance = np.cov(slopes, curvatures) / n
    means = np.array([slopes.mean(), curvatures.mean()])
    (c, b), (_, a) = np.outer(means, means) - t * t * covariance
    if a <= 0 or curvatures.mean() <= 0:
        return -math.inf, math.inf
    root = math.sqrt(max(b * b - a * c, 0.0))
    return (-b - root) / a, (-b + root) / a


def _bracket(points: _FLOATS, costs: _FLOATS, best: int) -> tuple[float, float]:
    """Return the nearest points below and above that are worse than the best one."""
    worse = _worse(costs, best)
    below, above = np.flatnonzero(worse[:best]), np.flatnonzero(worse[best + 1 :])
    low = points[below[-1]] if len(below) else -math.inf
    high = points[best + 1 + above[0]] if len(above) else math.inf
    return float(low), float(high)


def _worse(costs: _FLOATS, best: int) -> NDArray[np.bool_]:
    """Tell at which points the cost is above that at the best, by a paired t-test."""
    n = len(costs)
    lost = np.isinf(costs)
    if n == 1:
        alone: NDArray[np.bool_] = lost[0]
        return alone
    with np.errstate(invalid="ignore"):
        difference = np.where(lost, 0.0, costs - costs[:, [best]])
    error = difference.std(axis=0, ddof=1) / math.sqrt(n)
    quantile = float(stdtrit(n - 1, TWO_SIDED))
    apart = difference.mean(axis=0) > quantile * error
    worse: NDArray[np.bool_] = np.where(lost.any(axis=0), lost.mean(axis=0) >= 0.5, apart)
    return worse
