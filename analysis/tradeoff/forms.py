"""Forms of the trade-off between optimizer steps and batch size, and their least-squares fits.

All forms are written log S = p + softplus(q (c - log B)) with p = log a, c = log of the critical
batch and q = alpha: S = a (1 + (B_crit / B)^alpha). The two-term form S = a + b/B of McCandlish et
al. 2018 (arXiv:1812.06162, equation 2.11) has alpha = 1 and B_crit = b/a; with the free exponent
S = a + b/B^alpha, so that B_crit = (b/a)^(1/alpha) still doubles the fewest steps.

Residuals are those of log S. Every function works on many data sets at once: arrays have a first
axis of data sets, and a second of batch sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Form = Literal["two_term", "free_exponent"]
Floats = NDArray[np.float64]

FORMULAS: dict[Form, str] = {"two_term": "S = a + b/B", "free_exponent": "S = a + b/B^alpha"}
"""How each is written in texts."""

REACH = 12.0
"""How far beyond the batch sizes, in units of log B, a critical batch is looked for."""

_LOG_EXPONENTS = np.log([0.1, 10.0])
_MOST_ITERATIONS = 100
_TOLERANCE = 1e-7
# Steps of the optimizer of the fit are cut to these, in log B and log alpha.
_LONGEST = np.array([3.0, 1.0, 0.3])
# Relative misfit under which rounding, not the form, decides.
_LEAST_MISFIT = 1e-6


@dataclass(frozen=True)
class Data:
    """Cell means to fit."""

    x: Floats
    """Logarithms of the batch sizes, shape (batches,)."""
    y: Floats
    """Mean log steps, shape (data sets, batches)."""

    def rows(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Data:
        """Keep some of the data sets."""
        return Data(self.x, self.y[chosen])


@dataclass(frozen=True)
class Path:
    """A direction along which a quantity is moved, and those in which the fit then adapts."""

    along: tuple[float, ...]
    """Direction in (p, c, log q)."""
    free: tuple[tuple[float, ...], ...]
    """Directions of the parameters that are fitted anew; each moves one of p, c, log q, where the
    one of c may move p against it."""


_P, _C, _Q = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)
_ALL = {"two_term": (_P, _C), "free_exponent": (_P, _C, _Q)}


def predicted(x: Floats, theta: Floats) -> Floats:
    """Return log S, shape (data sets, batches), for parameters of shape (data sets, 3)."""
    p, c, log_q = theta.T[:, :, None]
    return np.asarray(p + np.logaddexp(0.0, np.exp(log_q) * (c - x)))


def jacobian(x: Floats, theta: Floats) -> Floats:
    """Return the derivatives of log S by p, c and log q, shape (data sets, batches, 3)."""
    _, c, log_q = theta.T[:, :, None]
    q = np.exp(log_q)
    share = expit(q * (c - x))
    return np.stack([np.ones_like(share), q * share, q * (c - x) * share], axis=-1)


def solve(data: Data, start: Floats, free: tuple[tuple[float, ...], ...]) -> Floats:
    """Minimise the squared residuals over some directions (Levenberg and Marquardt).

    Parameters
    ----------
    start : array, shape (data sets, 3)

    Returns
    -------
    array, shape (data sets, 3)
        Where c or q runs off, they end at their bounds.
    """
    basis = np.array(free).T
    # The critical batch and the exponent stay where they are looked for.
    low = np.array([-np.inf, data.x.min() - 2 * REACH, _LOG_EXPONENTS[0]])
    high = np.array([np.inf, data.x.max() + 2 * REACH, _LOG_EXPONENTS[1]])
    moved = [max(np.flatnonzero(column)) for column in basis.T]
    longest, identity = _LONGEST[moved], np.eye(len(free))
    theta = start.copy()
    damping = np.full(len(theta), 1e-6)
    residuals = data.y - predicted(data.x, theta)
    loss = (residuals**2).sum(axis=1)
    active = np.ones(len(theta), dtype=bool)
    for _ in range(_MOST_ITERATIONS):
        now = theta[active]
        slope = jacobian(data.x, now) @ basis
        normal = np.einsum("nbi,nbj->nij", slope, slope)
        right = np.einsum("nbi,nb->ni", slope, residuals[active])
        scale = np.einsum("nii->ni", normal) + 1e-300
        # A direction without effect must not make the system singular.
        damped = damping[active][:, None] * scale + 1e-280
        normal = normal + damped[:, :, None] * identity
        step = np.linalg.solve(normal, right[..., None])[..., 0].clip(-longest, longest)
        step = (now[:, moved] + step).clip(low[moved], high[moved]) - now[:, moved]
        after = now + step @ basis.T
        rows = np.flatnonzero(active)
        new_residuals = data.y[rows] - predicted(data.x, after)
        new_loss = (new_residuals**2).sum(axis=1)
        better = new_loss <= loss[rows]
        improved = rows[better]
        theta[improved], residuals[improved] = after[better], new_residuals[better]
        loss[improved] = new_loss[better]
        damping[rows] = np.where(better, damping[rows] / 10, damping[rows] * 10 + 1e-8)
        # A little always stays: two directions may be alike to the last digit.
        damping[rows] = np.maximum(damping[rows], 1e-12)
        active[rows] = (np.abs(step).max(axis=1) > _TOLERANCE) & (damping[rows] < 1e12)
        if not active.any():
            break
    return theta


def fit_form(data: Data, form: Form) -> tuple[Floats, Floats]:
    """Fit a form by least squares, from the best point of a grid.

    Returns
    -------
    tuple of array
        Parameters (p, c, log q), shape (data sets, 3), and sums of squared residuals.
    """
    exponents = np.linspace(-0.9, 0.9, 7) if form == "free_exponent" else np.zeros(1)
    x = data.x
    grid = np.linspace(x.min() - REACH / 2, x.max() + REACH / 2, 60)
    places = np.array([(0.0, c, q) for q in exponents for c in grid])
    shapes = predicted(x, places)
    n, ones = len(x), np.ones_like(data.y)
    heights = (data.y.sum(axis=1)[:, None] - ones @ shapes.T) / n
    squares = (data.y**2).sum(axis=1)[:, None] + ones @ (shapes**2).T
    squares = squares - 2 * data.y @ shapes.T - heights**2 * n
    best = squares.argmin(axis=1)
    start = places[best]
    start[:, 0] = heights[np.arange(len(best)), best]
    theta = solve(data, start, _ALL[form])
    return theta, ((data.y - predicted(data.x, theta)) ** 2).sum(axis=1)


def null_residuals(data: Data) -> dict[str, Floats]:
    """Return the sums of squares of S = b/B and of S = a, each shape (data sets,)."""
    forms = {"perfect_scaling": data.y + data.x, "constant": data.y}
    squares = {}
    for name, values in forms.items():
        mean = values.sum(axis=1) / values.shape[1]
        squares[name] = ((values - mean[:, None]) ** 2).sum(axis=1)
    return squares


def aicc(squares: float, n: int, parameters: int) -> float:
    """Return Akaike's criterion with the correction for small samples.

    n log(RSS/n) + 2k + 2k(k+1)/(n-k-1), k = parameters + 1 for the variance. n counts batch sizes,
    not runs: the form is fitted to their means, and more seeds at the same batch sizes say nothing
    new about its shape. Infinite where n <= k + 1, for nothing can then be said. Source: Hurvich
    and Tsai 1989, Biometrika 76, p. 297.

    Parameters
    ----------
    squares : float
        Sum of squared residuals of log S.
    n : int
        Batch sizes.
    parameters : int
        Fitted ones, without the variance.
    """
    k = parameters + 1
    if n <= k + 1:
        return float("inf")
    misfit = max(squares / n, _LEAST_MISFIT**2)
    return float(n * np.log(misfit) + 2 * k + 2 * k * (k + 1) / (n - k - 1))
