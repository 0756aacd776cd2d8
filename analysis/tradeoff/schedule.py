"""What a batch size that follows the gradient noise scale gains over a constant one.

Progress s is counted in steps of unlimited batch size: at batch size B one optimizer step makes a
progress of 1 / (1 + Bn/B), where Bn is the noise scale. A training of S_min such steps takes
S = integral of (1 + Bn/B) ds optimizer steps and E = integral of (B + Bn) ds samples. At constant B
(S/S_min - 1)(E/E_min - 1) = 1, with E_min the integral of Bn. The best schedule of all is
B(s) = sqrt(r Bn(s)), with r how many samples one optimizer step is worth; its product is
gamma = (integral of sqrt(Bn) ds)^2 / (S_min E_min), at most 1.

Source: McCandlish et al. 2018, arXiv:1812.06162, appendix D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from batchscape.errors import AnalysisError

__all__ = ["BatchSchedule", "batch_schedule_gain", "schedule_gain"]


@dataclass(frozen=True)
class BatchSchedule:
    """A noise scale over a training, and what a batch size that follows it would gain."""

    gamma: float
    """Excess of steps times excess of samples, 1 at constant batch size; without interval, for the
    errors of successive noise scales are not known to be independent."""
    s_min: float
    """Progress: steps at unlimited batch size."""
    e_min: float
    """Samples at vanishing batch size."""
    progress: NDArray[np.float64]
    noise_scale: NDArray[np.float64]
    """Samples, at each progress."""

    @property
    def saving(self) -> float:
        """Fraction of steps, and of samples, saved against a constant critical batch size.

        There both are twice the least; with the schedule they are 1 + sqrt(gamma) times.
        """
        return (1 - math.sqrt(self.gamma)) / 2

    def batch_sizes(self, samples_a_step: float) -> NDArray[np.float64]:
        """Return B(s) = sqrt(r Bn(s)) at each progress, for a step worth r samples."""
        if not (math.isfinite(samples_a_step) and samples_a_step > 0):
            msg = f"a step must be worth samples, above zero and finite, got {samples_a_step}"
            raise AnalysisError(msg)
        return np.sqrt(samples_a_step * self.noise_scale)


def batch_schedule_gain(curve: pd.DataFrame, *, batch_size: float) -> BatchSchedule:
    """Compute the gain from a noise scale recorded over a training at a constant batch size.

    Parameters
    ----------
    curve : DataFrame
        One row a window: `samples` (seen) and `estimate` (noise scale in samples), such as the
        rows of one cell of `noise_scale_curves`; rows without an estimate are left out.
    batch_size : float
        Global batch size of that training, in samples.

    Raises
    ------
    AnalysisError
        If columns are missing, fewer than two rows have an estimate, or a number is impossible.
    """
    missing = [name for name in ("samples", "estimate") if name not in curve.columns]
    if missing:
        msg = f"a curve of the noise scale needs samples and estimate; missing: {missing}"
        raise AnalysisError(msg)
    if not (math.isfinite(batch_size) and batch_size > 0):
        msg = f"batch_size counts samples and must be above zero and finite, got {batch_size}"
        raise AnalysisError(msg)
    rows = curve[["samples", "estimate"]].dropna().sort_values("samples").astype("float64")
    scale = rows["estimate"].to_numpy()
    _check_scale(scale)
    optimizer_steps = rows["samples"].to_numpy() / batch_size
    rates = 1 / (1 + scale / batch_size)
    parts = np.diff(optimizer_steps) * (rates[1:] + rates[:-1]) / 2
    return schedule_gain(np.concatenate([[0.0], np.cumsum(parts)]), scale)


def schedule_gain(progress: ArrayLike, noise_scale: ArrayLike) -> BatchSchedule:
    """Compute the gain from the noise scale as a function of progress.

    Parameters
    ----------
    progress : array, shape (n,)
        In steps of unlimited batch size, ascending.
    noise_scale : array, shape (n,)
        In samples; straight lines join the points, on which the integrals are exact.

    Raises
    ------
    AnalysisError
        If there are fewer than two points, progress does not rise, or a noise scale is not above
        zero (it may be zero at the start).
    """
    s, scale = np.asarray(progress, dtype=np.float64), np.asarray(noise_scale, dtype=np.float64)
    _check_scale(scale)
    width = np.diff(s)
    if s.shape != scale.shape or not (np.isfinite(s).all() and (width > 0).all()):
        msg = "progress must rise from point to point, with one noise scale each"
        raise AnalysisError(msg)
    left, right = np.sqrt(scale[:-1]), np.sqrt(scale[1:])
    # The mean of sqrt over a straight line from l^2 to r^2 is 2/3 (l^2 + l r + r^2) / (l + r).
    root = float((width * 2 / 3 * (left**2 + left * right + right**2) / (left + right)).sum())
    samples = float((width * (scale[:-1] + scale[1:]) / 2).sum())
    length = float(s[-1] - s[0])
    return BatchSchedule(root**2 / (length * samples), length, samples, s, scale)


def _check_scale(scale: NDArray[np.float64]) -> None:
    if len(scale) < 2:
        msg = f"a schedule needs the noise scale at two points at least, got {len(scale)}"
        raise AnalysisError(msg)
    if not (np.isfinite(scale).all() and (scale >= 0).all() and (scale[1:] > 0).all()):
        msg = "noise scales must be above zero and finite (zero at the very start is allowed)"
        raise AnalysisError(msg)
