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

    coefficients: Floats
    """Shape (terms,). Undetermined ones have the smallest values that fit."""
    covariance: Floats
    """Shape (terms, terms); NaN where no residual is left to estimate it from."""
    degrees: float
    spread: float
    """Standard deviation of a cell from the form, relative where `is_relative`."""
    is_relative: bool
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
        size = abs(mean.value) if self.is_relative else 1.0
        return Combination(mean.value, mean.variance + (self.spread * size) ** 2, mean.degrees)


def welch(parts: Sequence[tuple[ArrayLike, ArrayLike]]) -> tuple[Floats, Floats]:
    """Add up independent variances with their degrees of freedom; the sum has Welch's."""
    with np.errstate(divide="ignore", invalid="ignore"):
        variances, degrees = (
            np.array(np.broadcast_arrays(*column), dtype=float)
            for column in zip(*parts, strict=True)
        )
        total, shares = variances.sum(axis=0), (variances**2 / degrees).sum(axis=0)
        # No spread at all, as of times that agree exactly, leaves no degrees to share out.
        return total, np.where(shares > 0, total**2 / shares, degrees.min(axis=0))


def fit_linear(
    design: ArrayLike, measured: Sequence[ArrayLike], *, is_relative: bool = False
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
    is_relative : bool
        Whether errors grow in proportion to the value, as those of times do. Weights are then
        1 / fitted^2, iterated, and repeats, which differ, give the interval where there are no more
        cells than terms.
    """
    matrix = np.asarray(design, dtype=float)
    groups = [np.asarray(values, dtype=float) for values in measured]
    means = np.array([values.mean() for values in groups])
    scale = np.abs(matrix).max(axis=0, initial=0.0)
    scale[scale == 0] = 1.0
    size = np.abs(means) if is_relative else np.ones_like(means)
    for _ in range(_REWEIGHTINGS if is_relative else 1):
        solver, hat, null, rank = _solve(matrix / scale, size)
        coefficients = (solver @ means) / scale
        fitted = matrix @ coefficients
        if is_relative:
            # A fitted value of zero or below has no relative error: its cell keeps its own size.
            size = np.where(fitted > 0, fitted, np.abs(means))
    residuals, degrees = means - fitted, float(len(means) - rank)
    deviations, runs = residuals / size, np.ones_like(means)
    from_repeats = is_relative and not degrees
    if from_repeats:
        runs = np.array([len(values) for values in groups])
        deviations = np.concatenate(groups) - means.repeat(runs)
        deviations, degrees = deviations / size.repeat(runs), float(runs.sum() - len(means))
    square = float((deviations**2).sum() / degrees) if degrees else math.nan
    scaled = solver / scale[:, None]
    leverage = np.diag(hat)
    with np.errstate(divide="ignore", invalid="ignore"):
        left_out = means - np.where(leverage < 1 - 1e-9, residuals / (1 - leverage), math.nan)
    return LinearFit(
        coefficients,
        (scaled * (size**2 * square / runs)) @ scaled.T,
        degrees,
        math.sqrt(square),
        is_relative,
        from_repeats and degrees > 0,
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
