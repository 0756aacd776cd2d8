"""Statistics that keep runs which did not reach: medians with infinity, Kaplan-Meier, profiles.

A run that diverged has an infinite time to target and stays at risk for ever. A run that ended or
was cut before its target has one above its bound. To leave either out would favour whatever fails.

Sources: order-statistic interval: Conover 1999, Practical Nonparametric Statistics, section 3.2;
log(-log) interval of a survival curve: Kalbfleisch and Prentice 1980, The Statistical Analysis of
Failure Time Data, section 1.3; performance profiles: Dolan and More 2002, Mathematical Programming
91, p. 201.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, ndtri

from batchscape.analysis.estimates import LEVEL, NOT_IDENTIFIED, TWO_SIDED, Estimate
from batchscape.analysis.targets.tidy import refuse_missing
from batchscape.errors import AnalysisError

__all__ = ["kaplan_meier", "kaplan_meier_note", "median_with_infinity", "performance_profile"]

_MEDIAN = "order statistics with exact binomial coverage over {n} runs"


def median_with_infinity(low: ArrayLike, high: ArrayLike | None = None) -> Estimate:
    """Return the median of values of which some are infinite or known as bounds only.

    The median of all lower ends and that of all upper ends bracket the true one. Where they agree
    it is known, and may be infinite. For an even number it is the mean of the two in the middle.

    Parameters
    ----------
    low : array-like of float, shape (n,)
        Values, or lower bounds of those that are not known.
    high : array-like of float, shape (n,), optional
        The same values, or their upper bounds, inf where there is none; by default `low`.

    Returns
    -------
    Estimate
        With value inf where half of the runs or more never reach; its interval has infinite or
        zero ends where n is too small.

    Raises
    ------
    AnalysisError
        If there are no values, some are NaN or negative, or bounds are the wrong way round.
    """
    lower = np.sort(np.asarray(low, dtype=float))
    upper = lower if high is None else np.sort(np.asarray(high, dtype=float))
    if not len(lower) or len(lower) != len(upper) or not (lower <= upper).all() or lower[0] < 0:
        msg = (
            "a median needs at least one value, none of them NaN or negative, and as many upper "
            f"bounds not below them; got {low!r} and {high!r}"
        )
        raise AnalysisError(msg)
    n = len(lower)
    k = _rank(n)
    ends = (float(lower[k - 1]), float(upper[n - k])) if k > 0 else (0.0, math.inf)
    least, most = _median(lower), _median(upper)
    note = None if k > 0 else f"{n} runs bound a median at no level of {LEVEL:.0%}"
    if least != most:
        note = f"{NOT_IDENTIFIED}: runs that ended before reaching leave it open from {least:g} on"
    return Estimate(
        value=least if least == most else math.nan,
        low=ends[0],
        high=ends[1],
        n=n,
        unit="",
        method=_MEDIAN.format(n=n),
        definition="median over runs; a run that diverged counts as infinite",
        note=note,
    )


def kaplan_meier(durations: ArrayLike, observed: ArrayLike) -> pd.DataFrame:
    """Estimate the share of runs that have not reached yet, from reached and censored ones.

    Censoring must be uninformative: a run stopped at a budget that says nothing of when it would
    have reached. A run that diverged is not censored; give it as infinite and not observed, so
    that it stays at risk for ever. `kaplan_meier_note` says what else breaks the condition.

    Parameters
    ----------
    durations : array-like of float, shape (n,)
        When each run reached, or was last seen without; inf for runs that diverged.
    observed : array-like of bool, shape (n,)
        Whether it reached.

    Returns
    -------
    DataFrame
        One row a time at which runs reached: `time`, `at_risk`, `reached`, `survival`, `se`
        (Greenwood), `low`, `high` (pointwise, by his variance on the scale of log(-log); NaN where
        the survival is 0 or nothing is left at risk).

    Raises
    ------
    AnalysisError
        If a duration is NaN or negative, or an observed one is infinite.
    """
    times = np.asarray(durations, dtype=float)
    events = np.asarray(observed, dtype=bool)
    if times.shape != events.shape or not (times >= 0).all() or np.isinf(times[events]).any():
        msg = (
            "a duration is a number from 0 on, finite where the run reached, with one `observed` "
            f"for each; got {times[:8]} and {events[:8]}"
        )
        raise AnalysisError(msg)
    when, reached = np.unique(times[events], return_counts=True)
    at_risk = (times[None, :] >= when[:, None]).sum(axis=1)
    survival = np.cumprod(1 - reached / at_risk)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.cumsum(reached / (at_risk * (at_risk - reached)))
        se = survival * np.sqrt(variance)
        theta = ndtri(TWO_SIDED) * np.sqrt(variance) / np.log(survival)
        low, high = survival ** np.exp(-theta), survival ** np.exp(theta)
    ended = survival == 0
    return pd.DataFrame(
        {
            "time": when,
            "at_risk": at_risk,
            "reached": reached,
            "survival": survival,
            "se": np.where(ended, np.nan, se),
            "low": np.where(ended, np.nan, low),
            "high": np.where(ended, np.nan, high),
        }
    )


def kaplan_meier_note(outcomes: Sequence[str]) -> str | None:
    """Say why censoring among these runs is informative; None where it is not.

    Parameters
    ----------
    outcomes : sequence of str
        Outcome of each run, as `steps_to_target` names them.
    """
    found = set(outcomes)
    why = []
    if "pruned" in found:
        why.append("pruned runs were cut because they did badly")
    if "diverged" in found:
        why.append("runs that diverged count as infinite, not as censored")
    return "Kaplan-Meier estimate: " + "; ".join(why) if why else None


def performance_profile(
    reaches: pd.DataFrame, value: str = "samples_to_target", *, taus: ArrayLike | None = None
) -> pd.DataFrame:
    """Compute which share of runs of each global batch reached within tau times the best batch.

    The best is, of each group, target and seed, the lowest value over all batches; where no batch
    reached, the case counts in the denominators of all.

    Parameters
    ----------
    reaches : DataFrame
        As `steps_to_target` or `read_table` returns it.
    value : str
        Column to compare.
    taus : array-like of float, optional
        From 1 on; by default every ratio at which a share changes.

    Returns
    -------
    DataFrame
        `global_batch_size`, `tau`, `share` (0 to 1) and `n`, the cases.

    Raises
    ------
    AnalysisError
        If columns are missing or a tau is below 1.
    """
    refuse_missing(reaches, ["global_batch_size", value], "a performance profile")
    case = [name for name in ("group", "target_loss", "seed") if name in reaches]
    table = reaches.assign(value=reaches[value].fillna(np.inf).to_numpy(dtype=float))
    best = (
        table.groupby(case, dropna=False)["value"].transform("min")
        if case
        else table["value"].min()
    )
    ratios = np.where(np.isfinite(table["value"]), table["value"] / best, np.inf)
    finite = np.unique(ratios[np.isfinite(ratios)])
    grid = finite if taus is None else np.asarray(taus, dtype=float)
    if not (grid >= 1).all():
        msg = f"tau is a factor from 1 on, got {grid.min():g}"
        raise AnalysisError(msg)
    rows = [
        {"global_batch_size": batch, "tau": tau, "share": float((own <= tau).mean()), "n": len(own)}
        for batch, own in pd.Series(ratios, table.index).groupby(table["global_batch_size"])
        for tau in grid
    ]
    return pd.DataFrame(rows, columns=["global_batch_size", "tau", "share", "n"])


@lru_cache
def _rank(n: int) -> int:
    """Return the largest k with P(fewer than k of n lie below the median) <= (1 - LEVEL) / 2."""
    below = bdtr(np.arange(n // 2), n, 0.5)
    return int((below <= 1 - TWO_SIDED).sum())


def _median(values: NDArray[np.float64]) -> float:
    """Return the median of sorted values; one infinity in the middle makes it infinite."""
    n = len(values)
    return float((values[(n - 1) // 2] + values[n // 2]) / 2)
