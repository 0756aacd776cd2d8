"""An estimate: a number with its interval, its n, its method, or the reason why it has none.

Below three units (seeds, or pairs of them) no interval is shown, in any table or text: the value
stands alone, with its n. Student's t with one degree of freedom makes two seeds 13 standard errors
wide, and its logarithmic intervals end at 0 and in the millions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit

from batchscape.analysis.numbers import significant

__all__ = [
    "FEWEST",
    "LEVEL",
    "NOT_IDENTIFIED",
    "TWO_SIDED",
    "Estimate",
    "half_width",
    "half_widths",
    "interval_text",
    "t_reach",
    "too_few",
]

LEVEL = 0.95
"""Coverage that every interval aims at, unless it says otherwise."""

TWO_SIDED = (1 + LEVEL) / 2
"""Where in its distribution the upper end of such an interval lies."""

FEWEST = 3
"""Units, such as seeds, from which an interval is shown, quoted in a sentence and judged by."""

NOT_IDENTIFIED = "not identified"
"""Stands where the data do not determine a quantity."""


@dataclass(frozen=True)
class Estimate:
    """One quantity, estimated from runs."""

    value: float
    """NaN where it is not identified."""
    low: float
    """Lower end of the interval; NaN where none can be given, 0 or -inf where it has no end."""
    high: float
    """Upper end; NaN where none can be given, inf where it has no end."""
    n: int
    """Units behind the interval, such as seeds."""
    unit: str
    """Unit of value and ends; empty for a pure number."""
    method: str
    """How the interval was made, and over which units: "block jackknife-t over 5 seeds"."""
    definition: str
    """What the quantity is, exactly enough to compute it again."""
    note: str | None = None
    """Why it is not identified, or what weakens it."""
    readings: tuple[tuple[str, float], ...] = ()
    """Its value by each fair reading of its words, where these differ by more than its interval
    allows: `low` and `high` are then the range over the readings, in place of the interval."""
    group: str = ""
    """Which runs it is of, where it is told of several groups."""

    @classmethod
    def unknown(
        cls, why: str, n: int, definition: str, *, unit: str = "", method: str = "none"
    ) -> Estimate:
        """Return an estimate of what is not identified, for a reason."""
        note = f"{NOT_IDENTIFIED}: {why}"
        return cls(math.nan, math.nan, math.nan, n, unit, method, definition, note)

    @classmethod
    def of_mean(
        cls,
        values: NDArray[np.float64],
        definition: str,
        method: str,
        *,
        unit: str = "",
        note: str | None = None,
    ) -> Estimate:
        """Estimate a mean, as of paired differences, with its t-interval.

        Parameters
        ----------
        values : array, shape (n,)
            One a unit; without any the mean is NaN, and below two of them its ends are.
        """
        mean = float(values.mean()) if len(values) else math.nan
        half = half_width(values)
        return cls(mean, mean - half, mean + half, len(values), unit, method, definition, note)

    @classmethod
    def of_ratio(
        cls,
        logs: NDArray[np.float64],
        definition: str,
        method: str,
        *,
        unit: str = "",
        note: str | None = None,
    ) -> Estimate:
        """Estimate a geometric mean, as of ratios, of logarithms of shape (n,)."""
        found = cls.of_mean(logs, definition, method, unit=unit, note=note)
        value, low, high = np.exp([found.value, found.low, found.high]).tolist()
        return replace(found, value=value, low=low, high=high)

    @property
    def is_identified(self) -> bool:
        """Whether there is a finite value."""
        return math.isfinite(self.value)

    def text(self, digits: int = 3) -> str:
        """Write value and interval, or what is known instead.

        Parameters
        ----------
        digits : int
            Significant digits.

        Returns
        -------
        str
            As in `120 [95, 160]`, `120 [95, ∞]`, `120`, `120 (n = 2)`,
            `not identified (≥ 80)`, or, for a range over readings, `80 to 120`.
        """
        if self.readings:
            return f"{significant(self.low, digits)} to {significant(self.high, digits)}"
        if not self.is_identified:
            least = f" (≥ {significant(self.low, digits)})" if self.low > 0 else ""
            return NOT_IDENTIFIED + least
        return interval_text(self.value, self.low, self.high, self.n, digits)


def too_few(n: int, what: str, fewest: int = FEWEST) -> str:
    """Say that there are too few units, as in `too few seeds (n = 2; 3 needed)`."""
    return f"too few {what} (n = {n}; {fewest} needed)"


@overload
def t_reach(error: float, degrees: float, level: float = LEVEL) -> float: ...


@overload
def t_reach(
    error: NDArray[np.float64], degrees: NDArray[np.float64], level: float = LEVEL
) -> NDArray[np.float64]: ...


@overload
def t_reach(
    error: pd.Series[float], degrees: pd.Series[float], level: float = LEVEL
) -> pd.Series[float]: ...


def t_reach(error, degrees, level=LEVEL):  # type: ignore[no-untyped-def]
    """Return how far Student's t-interval reaches to each side.

    Parameters
    ----------
    error : float, or array or Series, shape (n,)
        Standard error of what the interval is of; 1 gives the quantile itself.
    degrees : float, or array or Series, shape (n,)
        Degrees of freedom of the standard error.
    level : float
        Coverage of the two-sided interval.

    Returns
    -------
    float, or array or Series, shape (n,)
        NaN where there are no degrees of freedom.
    """
    reach = stdtrit(degrees, (1 + level) / 2) * error
    return float(reach) if np.ndim(reach) == 0 else reach


def half_width(values: NDArray[np.float64], level: float = LEVEL) -> float:
    """Return the half-width of the t-interval of a mean; NaN for fewer than two values."""
    n = len(values)
    if n < 2:
        return math.nan
    return t_reach(float(values.std(ddof=1)), n - 1, level) / math.sqrt(n)


def half_widths(sd: pd.Series[float], n: pd.Series[int]) -> pd.Series[float]:
    """Return half-widths of the t-intervals of means; missing below `FEWEST` values.

    Parameters
    ----------
    sd, n : Series, shape (means,)
        Standard deviation of the values behind each mean, and their number.
    """
    return t_reach(sd, (n - 1).where(n >= FEWEST).astype(float)) / np.sqrt(n)


def interval_text(value: float, low: float, high: float, n: int, digits: int = 3) -> str:
    """Write a value with its interval, or with its n where that is below `FEWEST`.

    Parameters
    ----------
    value, low, high : float
        NaN where there is none.
    n : int
        Units behind the interval.
    digits : int
        Significant digits.

    Returns
    -------
    str
        As in `120 [95, 160]`, `120`, `120 (n = 2)`, or `MISSING`.
    """
    text = significant(value, digits)
    if math.isnan(value):
        return text
    if n < FEWEST:
        return f"{text} (n = {n})"
    if math.isnan(low) or math.isnan(high):
        return text
    return f"{text} [{significant(low, digits)}, {significant(high, digits)}]"
