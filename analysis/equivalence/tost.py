"""Two one-sided tests: whether a mean difference lies within a margin that was fixed beforehand.

Sources: Schuirmann 1987, doi:10.1007/BF01068419 (the tests, and that they amount to an interval of
level 1 - 2 alpha within the margin); Berger, Hsu 1996, doi:10.1214/ss/1032280304 (several
comparisons that must all be equivalent need no correction: an intersection-union test).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtr

from batchscape.analysis.estimates import t_reach
from batchscape.analysis.numbers import significant
from batchscape.text import count_text

ALPHA = 0.05
"""Largest probability of the verdict equivalent where the difference equals the margin."""

Equivalence = Literal["equivalent", "different", "not identified"]
"""A difference that is not shown is no equivalence; so there is a third verdict."""


class Tost(NamedTuple):
    """Verdict of paired differences on a margin."""

    n: int
    """Pairs."""
    low: float
    """Lower end of the (1 - 2 alpha) t-interval of the mean."""
    high: float
    margin: float
    verdict: Equivalence
    """Equivalent: the interval lies within the margin. Different: it lies wholly beyond it."""
    reason: str | None
    """Why it is not identified."""
    p_equivalent: float
    """Larger p value of the two one-sided tests: small where the mean is within the margin."""
    p_different: float
    """p value of the test that the mean is beyond the margin."""
    smallest_margin: float
    """Equivalent by any margin above this one."""
    mean: float
    """Mean difference."""
    sd: float
    """Of the differences, ddof 1."""


def tost(differences: ArrayLike, margin: float, alpha: float = ALPHA) -> Tost:
    """Test whether the mean of paired differences lies within a margin.

    Parameters
    ----------
    differences : array_like, shape (n,)
        One a pair, such as a seed; infinite where only one member of the pair trained, or reached
        its target.
    margin : float
        In the unit of the differences, fixed before they were seen.
    alpha : float
        Level of each of the two tests.
    """
    values = np.asarray(differences, dtype=float).ravel()
    n, infinite = len(values), int(np.isinf(values).sum())
    verdict: Equivalence = "not identified"
    mean = float(values.mean()) if n and not infinite else math.nan
    if n < 2 or infinite:
        reason: str | None = f"{count_text(n, 'pair')}; a spread needs 2"
        if infinite:
            reason = f"{infinite} of {n} pairs have no finite difference"
        nan = math.nan
        return Tost(n, nan, nan, margin, verdict, reason, nan, nan, nan, mean, nan)
    sd = float(values.std(ddof=1))
    error, freedom = sd / math.sqrt(n), n - 1
    half = t_reach(error, freedom, 1 - 2 * alpha)
    low, high = mean - half, mean + half
    reason = (
        f"the {1 - 2 * alpha:.0%} interval [{significant(low, 2)}, {significant(high, 2)}] is "
        f"neither within nor beyond {significant(margin, 3)}"
    )
    if -margin < low and high < margin:
        verdict, reason = "equivalent", None
    elif low > margin or high < -margin:
        verdict, reason = "different", None
    p_equivalent = _survival(margin - abs(mean), error, freedom)
    p_different = _survival(abs(mean) - margin, error, freedom)
    ps_and_furthest = p_equivalent, p_different, max(abs(low), abs(high))
    return Tost(n, low, high, margin, verdict, reason, *ps_and_furthest, mean, sd)


def _survival(distance: float, error: float, freedom: float) -> float:
    """Return the probability of a t statistic above distance / error; the error may be zero."""
    if error == 0:
        return 0.5 if distance == 0 else float(distance < 0)
    return float(stdtr(freedom, -distance / error))
