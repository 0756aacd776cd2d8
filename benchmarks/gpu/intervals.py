"""A ratio of times with its interval, from pairs of measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats


def ratio(name: str, on: NDArray[np.float64], off: NDArray[np.float64]) -> dict[str, Any]:
    """Return the geometric mean of the ratios of pairs, with its 95 % t-interval.

    Parameters
    ----------
    name : str
        What is compared.
    on, off : ndarray, shape (pairs,)
        Times; of one pair there is no interval.
    """
    logs = np.log(on / off)
    low = high = None
    if len(logs) > 1:
        half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
        low, high = (float(np.exp(logs.mean() + side * half)) for side in (-1, 1))
    value = float(np.exp(logs.mean()))
    return {"comparison": name, "value": value, "low": low, "high": high, "n": len(logs)}
