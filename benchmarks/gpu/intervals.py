"""Ratios and differences with their intervals, from pairs of measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

_ENDS = ("low", "high")


def ratio(name: str, on: NDArray[np.float64], off: NDArray[np.float64]) -> dict[str, Any]:
    """Return the geometric mean of the ratios of pairs, with its 95 % t-interval.

    Parameters
    ----------
    name : str
        What is compared.
    on, off : ndarray, shape (pairs,)
        Times; of one pair there is no interval.
    """
    logs = mean(np.log(on / off), 0.95)
    ends = {side: None if logs[side] is None else float(np.exp(logs[side])) for side in _ENDS}
    return {"comparison": name, "value": float(np.exp(logs["value"])), **ends, "n": logs["n"]}


def mean(values: NDArray[np.float64], level: float) -> dict[str, Any]:
    """Return the mean with its t-interval; of one value there is none.

    Parameters
    ----------
    values : ndarray, shape (n,)
    level : float
        Of the interval, such as 0.95.
    """
    value, n = float(values.mean()), len(values)
    half = stats.t.ppf((1 + level) / 2, n - 1) * stats.sem(values) if n > 1 else None
    low, high = (None if half is None else float(value + side * half) for side in (-1, 1))
    return {"value": value, "low": low, "high": high, "n": n}
