"""Intervals of fitted trade-offs that respect seeds shared by batch sizes.

The interval of a quantity holds all values that a score test does not reject. At each value the
other parameters are fitted anew; the derivative of log S by the quantity, made orthogonal to those
by the other parameters, weighs the residuals of the cells to one number a seed. Its mean over seeds
is zero at the true value, and is compared with its spread over seeds by Student's t. Whatever the
correlation between the runs of one seed, seeds are independent, so that for the two-term critical
batch and normal log steps the test is exact at any number of seeds. It needs no fit without a seed,
and where the data do not bound a quantity the interval has no end, as Fieller's.

Where batch sizes share seeds (as here by construction) the spread is that over seeds; where they
do not, variances add up over batch sizes and degrees of freedom follow Satterthwaite. A batch size
with a single run among others with several gets their pooled variance.

Source: score tests by clusters, Boos 1992, The American Statistician 46, p. 327; degrees of freedom
by Satterthwaite 1946, Biometrics Bulletin 2, p. 110.

Notes
-----
Chosen by simulating coverage of the two-term critical batch size at 95 %: 400 sweeps in each of two
cases (eight batch sizes of 16 to 2048; critical at 256 with 5 % scatter, at 1500 with 20 %) with
correlations within a seed of 0 and 0.7 (at ten seeds of 0 only), lowest to highest case:

============================ ============ ============ ============
seeds                        3            5            10
============================ ============ ============ ============
score, as here               94 %         96 to 97 %   93 to 94 %
jackknife-t by seed          94 %         96 to 97 %   94 %
bootstrap-t by seed          76 to 79 %   94 to 95 %   94 %
percentile bootstrap by seed 65 to 70 %   82 to 84 %   89 to 90 %
percentile bootstrap by cell 81 to 97 %   89 to 99 %   90 to 91 %
============================ ============ ============ ============

The jackknife-t is as good where all is well, but has two finite ends whatever the data say, and
needs seeds that all batch sizes share. Over 1000 sweeps each with critical batch sizes of 30, 100
and 400 among batches of 8 to 1024, 10 % scatter, 3, 5 and 10 seeds and both correlations, scores
cover 94 to 96 % for a, b and b/a of the two-term form, and 93 to 96 % for a, alpha and the critical
batch of the free exponent. `tests/analysis/tradeoff/test_coverage.py` repeats a part of this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import elementwise
from scipy.special import stdtrit

from batchscape.analysis.estimates import TWO_SIDED
from batchscape.analysis.tradeoff.forms import REACH, Data, Floats, Form, Path, jacobian, predicted
from batchscape.analysis.tradeoff.forms import solve as refit
from batchscape.analysis.tradeoff.noise import Noise, Rows

_FIRST_STEP = 1e-9
_GROWTH = 1.6
_PRECISION = 1e-8

PATHS: dict[Form, dict[str, Path]] = {
    "two_term": {
        "critical_batch_size": Path((0, 1, 0), ((1, 0, 0),)),
        "s_min": Path((1, 0, 0), ((0, 1, 0),)),
        # log b = p + c is held by moving p against c.
        "e_min": Path((1, 0, 0), ((-1, 1, 0),)),
    },
    "free_exponent": {
        "critical_batch_size": Path((0, 1, 0), ((1, 0, 0), (0, 0, 1))),
        "s_min": Path((1, 0, 0), ((0, 1, 0), (0, 0, 1))),
        "exponent": Path((0, 0, 1), ((1, 0, 0), (0, 1, 0))),
    },
}
"""How each quantity of a form moves."""


def intervals(data: Data, noise: Noise, theta: Floats, path: Path) -> tuple[Floats, Floats]:
    """Return how far a quantity may lie below and above its estimate.

    Parameters
    ----------
    theta : array, shape (data sets, 3)
        The fits.

    Returns
    -------
    tuple of array, shape (data sets,)
        Distances along the path, the first negative, in logarithms; infinite where the data set
        no end.
    """
    n = len(theta)
    both = np.concatenate([np.arange(n)] * 2)
    search = _RejectionSearch(
        data.rows(both),
        noise.rows(both),
        path,
        np.repeat([-1.0, 1.0], n)[:, None] * np.array(path.along),
    )
    reach = search.ends(theta[both])
    return -reach[:n], reach[n:]


def band(
    data: Data, noise: Noise, theta: Floats, at: Floats, parameters: int
) -> tuple[Floats, Floats]:
    """Return standard errors, and degrees of freedom, of log S at any batch sizes.

    Parameters
    ----------
    data, noise, theta
        As for `intervals`.
    at : array, shape (places,)
        Logarithms of batch sizes.
    parameters : int
        Fitted ones, of (p, c, log q) the first.

    Returns
    -------
    tuple of array, shape (data sets, places)
        By linear propagation of the errors of cell means.
    """
    weights = influence(data, theta, jacobian(at, theta)[..., :parameters])
    spreads = [noise.variance(weights[:, place]) for place in range(len(at))]
    errors, degrees = (np.stack(values, axis=1) for values in zip(*spreads, strict=True))
    return np.sqrt(errors), degrees


def influence(data: Data, theta: Floats, slopes: Floats) -> Floats:
    """Return how quantities move with each cell mean.

    Parameters
    ----------
    theta : array, shape (data sets, 3)
    slopes : array, shape (data sets, quantities, parameters)
        Derivatives of the quantities by the parameters fitted, of (p, c, log q) the first.

    Returns
    -------
    array, shape (data sets, quantities, batches)
    """
    design = jacobian(data.x, theta)[..., : slopes.shape[-1]]
    normal = np.einsum("nbi,nbj->nij", design, design)
    inverse = np.linalg.pinv(normal, hermitian=True)
    moved: Floats = slopes @ inverse @ np.swapaxes(design, 1, 2)
    return moved


@dataclass(frozen=True)
class _RejectionSearch:
    """For where a test begins to reject, one way for each data set."""

    data: Data
    noise: Noise
    path: Path
    ways: Floats
    """Directions in (p, c, log q), shape (data sets, 3)."""

    def ends(self, theta: Floats) -> Floats:
        """Return how far from the fits the tests reject; infinite where they never do."""
        inside, outside, anchor = self._bracketed(theta)
        has_end = np.isfinite(outside)
        if has_end.any():
            search = self._rows(has_end)
            outside[has_end] = search._narrowed(inside[has_end], outside[has_end], anchor[has_end])
        return outside

    def _rows(self, chosen: Rows) -> _RejectionSearch:
        return _RejectionSearch(
            self.data.rows(chosen),
            self.noise.rows(chosen),
            self.path,
            self.ways[chosen],
        )

    def _bracketed(self, theta: Floats) -> tuple[Floats, Floats, Floats]:
        """Step outwards, from where the test would reject if curves were straight."""
        n = len(theta)
        inside, outside, anchor = np.zeros(n), np.full(n, np.inf), theta.copy()
        straight = self.test_value(theta)[2]
        step = np.clip(straight, _FIRST_STEP, REACH / 4)
        active = np.ones(n, dtype=bool)
        while active.any():
            rows = np.flatnonzero(active)
            search = self._rows(active)
            moved, excess, _ = search.test_value(
                anchor[rows] + (step - inside)[rows, None] * search.ways
            )
            out = excess > 0
            outside[rows[out]], inside[rows[~out]] = step[rows[out]], step[rows[~out]]
            anchor[rows[~out]] = moved[~out]
            step = step * _GROWTH
            active[rows] = ~out & (step[rows] < REACH)
        return inside, outside, anchor

    def _narrowed(self, low: Floats, high: Floats, anchor: Floats) -> Floats:
        """Close in on the end; it is at `low` where even the fit is rejected, by its rounding."""

        def excess(at: Floats, row: NDArray[np.int64]) -> Floats:
            search = self._rows(row)
            return search.test_value(anchor[row] + (at - low[row])[:, None] * search.ways)[1]

        root = elementwise.find_root(
            excess,
            (low, high),
            args=(np.arange(len(low)),),
            tolerances={"xatol": _PRECISION, "xrtol": 0.0},
        )
        return np.where(root.success, root.x, low)

    def test_value(self, theta: Floats) -> tuple[Floats, Floats, Floats]:
        """Fit the free parameters, and test the value of the quantity.

        Returns the parameters, the test statistic less its limit, and the distance at which a
        straight curve would be rejected.
        """
        data = self.data
        theta = refit(data, theta, self.path.free)
        slopes = jacobian(data.x, theta)
        free = slopes @ np.array(self.path.free).T
        along = slopes @ np.array(self.path.along)
        normal = np.einsum("nbi,nbj->nij", free, free)
        right = np.einsum("nbi,nb->ni", free, along)
        inverse = np.linalg.pinv(normal, hermitian=True, rcond=1e-14)
        score = along - np.einsum("nbi,ni->nb", free, np.einsum("nij,nj->ni", inverse, right))
        # Near the ends of its range a quantity hardly moves the curve; only directions matter.
        scale = np.abs(score).max(axis=1, keepdims=True) + 1e-300
        score = score / scale
        total = np.abs((score * (data.y - predicted(data.x, theta))).sum(axis=1))
        variance, degrees = self.noise.variance(score)
        error = np.sqrt(variance) + 1e-15
        limit = stdtrit(degrees, TWO_SIDED)
        with np.errstate(divide="ignore", over="ignore"):
            # Infinite where the quantity has no effect at all.
            straight = limit * error / ((score**2).sum(axis=1) * scale[:, 0])
        return theta, total / error - limit, straight
