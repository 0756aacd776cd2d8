"""Least squares that tells which of its terms the measurements determine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from batchscape.analysis.estimates import TWO_SIDED

_RANK_TOLERANCE = 1e-9
_NULL_TOLERANCE = 1e-7
_REWEIGHTINGS = 20

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Combination:
    """A linear combination of coefficients."""

    value: float
    """NaN where the measurements do not determine it."""
    variance: float
    """NaN where no residual is left to estimate it from."""
    degrees: float
    """Degrees of freedom of the variance."""

    def interval(self) -> tuple[float, float]:
        """Return the two ends of the t-interval; NaN where there is none."""
        if not (math.isfinite(self.variance) and self.degrees > 0):
            return math.nan, math.nan
        half = float(stdtrit(self.degrees, TWO_SIDED)) * math.sqrt(self.variance)
        return self.value - half, self.value + half


@dataclass(frozen=True)
class LinearFit:
    """Coefficients, and how well the measurements determine each combination of them."""

    terms: tuple[str, ...]
    coefficients: Floats
    """Shape (terms,). Undetermined ones have the smallest values that fit."""
    covariance: Floats
    """Shape (terms, terms); NaN where no residual is left to estimate it from."""
    degrees: float
    spread: float
    """Standard deviation of a cell from the form, relative where `relative`."""
    relative: bool
    from_repeats: bool
    """Whether the covariance comes from repeats of equal cells: with no more cells than terms the
    form itself is not tested."""
    fitted: Floats
    """Shape (cells,)."""
    left_out: Floats
    """Shape (cells,): prediction of each cell by a fit to the others; NaN where they cannot."""
    null_space: Floats
    """Shape (directions, terms), in units of `scale`: undetermined combinations."""
    scale: Floats
    """Shape (terms,): largest size of each term."""

    def combine(self, weights: ArrayLike) -> Combination:
        """Estimate the sum of the coefficients times `weights`, of shape (terms,)."""
        vector = np.asarray(weights, dtype=float)
        scaled = vector / self.scale
        unknown = np.abs(self.null_space @ scaled).max(initial=0.0)
        if unknown > _NULL_TOLERANCE * np.abs(scaled).max(initial=0.0):
            return Combination(math.nan, math.nan, 0.0)
        return Combination(
            float(vector @ self.coefficients),
            float(vector @ self.covariance @ vector),
            self.degrees,
        )

    def predict(self, weights: ArrayLike) -> Combination:
        """Estimate the same for a new cell, which departs from the form too."""
        mean = self.combine(weights)
        size = abs(mean.value) if self.relative else 1.0
        return Combination(mean.value, mean.variance + (self.spread * size) ** 2, mean.degrees)

    def term(self, name: str) -> Combination:
        """Estimate one coefficient."""
        return self.combine([float(name == term) for term in self.terms])


def fit_linear(
    terms: Sequence[str],
    design: ArrayLike,
    measured: Sequence[ArrayLike],
    *,
    relative: bool = False,
    repeats: bool = False,
) -> LinearFit:
    """Fit cell means by (weighted) least squares.

    Cells are the units: repeats of a cell share its departure from the form, so they do not
    multiply the degrees of freedom. Each cell counts once.

    Parameters
    ----------
    design : array, shape (cells, terms)
        Finite values.
    measured : sequence of arrays
        Finite measurements of each cell, at least one.
    relative : bool
        Whether errors grow in proportion to the value. Weights are then 1 / fitted^2, iterated.
    repeats : bool
        Whether repeats may give the interval where there are no more cells than terms.
    """
    matrix = np.asarray(design, dtype=float)
    groups = [np.asarray(values, dtype=float) for values in measured]
    means = np.array([values.mean() for values in groups])
    scale = np.abs(matrix).max(axis=0, initial=0.0)
    scale[scale == 0] = 1.0
    size = np.abs(means) if relative else np.ones_like(means)
    for _ in range(_REWEIGHTINGS if relative else 1):
        solver, hat, null, rank = _solve(matrix / scale, size)
        coefficients = (solver @ means) / scale
        fitted = matrix @ coefficients
        if relative:
            # A fitted value of zero or below has no relative error: its cell keeps its own size.
            size = np.where(fitted > 0, fitted, np.abs(means))
    degrees = float(len(means) - rank)
    residuals = means - fitted
    variances = np.full(len(means), math.nan)
    square, from_repeats = math.nan, False
    if degrees > 0:
        square = float(((residuals / size) ** 2).sum() / degrees)
        variances = size**2 * square
    elif repeats:
        square, degrees = _pooled(groups, size)
        variances = size**2 * square / np.array([len(values) for values in groups])
        from_repeats = degrees > 0
    scaled = solver / scale[:, None]
    leverage = np.diag(hat)
    with np.errstate(divide="ignore", invalid="ignore"):
        left_out = means - np.where(leverage < 1 - 1e-9, residuals / (1 - leverage), math.nan)
    return LinearFit(
        tuple(terms),
        coefficients,
        (scaled * variances) @ scaled.T,
        degrees,
        math.sqrt(square),
        relative,
        from_repeats,
        fitted,
        left_out,
        null,
        scale,
    )


def _solve(matrix: Floats, size: Floats) -> tuple[Floats, Floats, Floats, int]:
    """Return maps of means to coefficients and to fitted values, the null space, and the rank."""
    weighted = matrix / size[:, None]
    u, values, v = np.linalg.svd(weighted, full_matrices=True)
    rank = int((values > _RANK_TOLERANCE * values.max(initial=0.0)).sum())
    inverse = v[:rank].T / values[:rank] @ u[:, :rank].T
    return inverse / size, matrix @ inverse / size, v[rank:], rank


def _pooled(groups: Sequence[Floats], size: Floats) -> tuple[float, float]:
    """Return the pooled (relative) variance within cells, and its degrees of freedom."""
    degrees = float(sum(len(values) - 1 for values in groups))
    if not degrees:
        return math.nan, 0.0
    squares = sum(
        float(((values - values.mean()) ** 2).sum()) / unit**2
        for values, unit in zip(groups, size, strict=True)
    )
    return squares / degrees, degrees
