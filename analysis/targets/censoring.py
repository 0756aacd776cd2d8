"""Bounds of censored runs, and medians over runs that did not all reach their target.

The time to target of a run that diverged is infinite. That of a run that ended or was cut before
its target lies above a bound. To leave either out would favour settings that fail.

Source: order-statistic interval: Conover 1999, Practical Nonparametric Statistics, section 3.2.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from scipy.special import bdtr

from batchscape.analysis.estimates import TWO_SIDED
from batchscape.analysis.joins import column_of


def median_with_infinity(
    low: ArrayLike, high: ArrayLike | None = None
) -> tuple[float, float, float]:
    """Return the median of values, where some may be infinite and some known as bounds only.

    The median of all lower ends and that of all upper ends bracket the true one. Where they agree
    it is known, and may be infinite. For an even number it is the mean of the two in the middle.

    Parameters
    ----------
    low : array-like of float, shape (n,)
        Values, one at least, or lower bounds of those that are not known; none is NaN or negative.
    high : array-like of float, shape (n,), optional
        The same values, or their upper bounds, inf where there is none; by default `low`.

    Returns
    -------
    tuple of float
        The median: inf where half of the runs or more never reach, NaN where it is left open. The
        ends of its interval from order statistics, with exact binomial coverage: 0 and inf where n
        is too small.
    """
    lower = np.sort(np.asarray(low, dtype=float))
    upper = lower if high is None else np.sort(np.asarray(high, dtype=float))
    n = len(lower)
    # The largest k with P(fewer than k of n lie below the median) <= (1 - LEVEL) / 2.
    k = int((bdtr(np.arange(n // 2), n, 0.5) <= 1 - TWO_SIDED).sum())
    ends = (float(lower[k - 1]), float(upper[n - k])) if k > 0 else (0.0, math.inf)
    least, most = float(np.median(lower)), float(np.median(upper))
    return least if least == most else math.nan, *ends


def samples_or_bound(reaches: pd.DataFrame) -> pd.Series[float]:
    """Return the samples that each run needed to its target, or certainly exceeded.

    Parameters
    ----------
    reaches : DataFrame
        One row a run, of one target: `global_batch_size`, `outcome` and `samples_to_target`;
        `steps_low` where there is a bound.
    """
    value = reaches["samples_to_target"].astype(float).where(reaches["outcome"].eq("reached"))
    batch = reaches["global_batch_size"]
    low = column_of(reaches, "steps_low").astype(float) * batch
    low = low.where(np.isfinite(low))
    # What diverged never reaches: it exceeds at least what the longest run of its batch did.
    return value.fillna(low).fillna(low.groupby(batch).transform("max"))
