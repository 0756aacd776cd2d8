"""Corrections for the number of tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["holm"]


def holm(p_values: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Adjust p values for their number, so that they bound the family-wise error.

    Parameters
    ----------
    p_values : sequence of float, shape (n,)
        NaN: not tested, and not counted.

    Returns
    -------
    array of float, shape (n,)
        In the same order. Source: Holm (1979), "A simple sequentially rejective multiple test
        procedure".
    """
    given = np.asarray(p_values, dtype=float)
    adjusted = np.full(given.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(given))
    order = tested[np.argsort(given[tested], kind="stable")]
    stepped = np.maximum.accumulate(given[order] * np.arange(len(order), 0, -1))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted
