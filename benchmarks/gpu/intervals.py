"""A ratio of times with its interval, from blocks of steps that alternated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import stats


def ratio(on: NDArray[np.float64], off: NDArray[np.float64]) -> dict[str, float | int]:
    """Return the geometric mean of the ratios of paired blocks, with its 95 % t-interval.

    Parameters
    ----------
    on, off : ndarray, shape (pairs,)
        Time of each block.
    """
    logs = np.log(on / off)
    half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
    low, middle, high = np.exp([logs.mean() - half, logs.mean(), logs.mean() + half])
    return {"ratio": float(middle), "low": float(low), "high": float(high), "pairs": len(logs)}


def shown(found: dict[str, float | int]) -> str:
    """Return a ratio in words."""
    return (
        f"{found['ratio']:.3f} (95 % interval {found['low']:.3f} to {found['high']:.3f}, "
        f"{found['pairs']} pairs of blocks)"
    )
