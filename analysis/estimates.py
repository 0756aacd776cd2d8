"""An estimate: a number with its interval, its n, its method, or the reason why it has none.

Below three units (seeds, or pairs of them) no interval is shown, in any table or text: the value
stands alone, with its n. Student's t with one degree of freedom makes two seeds 13 standard errors
wide, and its logarithmic intervals end at 0 and in the millions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit

from batchscape.analysis.numbers import significant

Numbers = TypeVar("Numbers", float, "NDArray[np.float64]", "pd.Series[float]")

LEVEL = 0.95
"""Coverage that every interval aims at, unless it says otherwise."""

TWO_SIDED = (1 + LEVEL) / 2
"""Probability below the upper end of such an interval."""

FEWEST = 3
"""Fewest units, such as seeds, for which an interval is shown, quoted and used for a verdict."""

NOT_IDENTIFIED = "not identified"
"""Written where the data do not determine a quantity."""


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
    """Method and units of the interval: "block jackknife-t over 5 seeds"."""
    definition: str
    """Definition of the quantity, exact enough to recompute it."""
    note: str | None = None
    """Why it is not identified, or what weakens it."""
    readings: tuple[tuple[str, float], ...] = ()
    """Its value by each fair reading of its definition, if these differ by more than the interval:
    `low` and `high` are then the range over the readings."""
    group: str = ""
    """Label of its group of runs, where there are several."""

    @classmethod
    def unknown(
        cls, why: str, n: int, definition: str, *, unit: str = "", method: str = "none"
    ) -> Estimate:
        """Return an estimate of a quantity that is not identified, with the reason."""
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
        mean = cls.of_mean(logs, definition, method, unit=unit, note=note)
        value, low, high = np.exp([mean.value, mean.low, mean.high]).tolist()
        return replace(mean, value=value, low=low, high=high)

    @property
    def is_identified(self) -> bool:
        """Whether there is a finite value."""
        return math.isfinite(self.value)

    def text(self, digits: int = 3) -> str:
        """Write value and interval, or the lower bound or range in their place.

        Parameters
        ----------
        digits : int
            Significant digits.

        Returns
        -------
        str
            As in `120 [95, 160]`, `120 [95, ∞]`, `120`, `120 (n = 2)`,
            `not identified (≥ 80)`, `not identified (≤ 20)`, or, for a range over readings,
            `80 to 120`.
        """
        if self.readings:
            return f"{significant(self.low, digits)} to {significant(self.high, digits)}"
        if not self.is_identified:
            bounds = [f"≥ {significant(self.low, digits)}"] * bool(self.low > 0)
            bounds += [f"≤ {significant(self.high, digits)}"] * bool(
                math.isfinite(self.high) and self.n >= FEWEST
            )
            return NOT_IDENTIFIED + (f" ({', '.join(bounds)})" if bounds else "")
        return interval_text(self.value, self.low, self.high, self.n, digits)


def too_few(n: int, units: str, fewest: int = FEWEST) -> str:
    """Write that there are too few units, as in `too few seeds (n = 2; 3 needed)`."""
    return f"too few {units} (n = {n}; {fewest} needed)"


def t_reach(error: Numbers, degrees: Numbers, level: float = LEVEL) -> Numbers:
    """Return how far Student's t-interval reaches to each side of a value, given its error."""
    reach: Any = stdtrit(degrees, (1 + level) / 2) * error
    half: Numbers = reach if np.ndim(reach) else reach.item()
    return half


def half_width(values: NDArray[np.float64], level: float = LEVEL) -> float:
    """Return the half-width of the t-interval of a mean; NaN for fewer than two values."""
    n = len(values)
    if n < 2:
        return math.nan
    return t_reach(float(values.std(ddof=1)), n - 1, level) / math.sqrt(n)


def half_widths(sd: pd.Series[float], n: pd.Series[int]) -> pd.Series[float]:
    """Return half-widths of the t-intervals of means; missing below `FEWEST` values."""
    return t_reach(sd, (n - 1).where(n >= FEWEST).astype(float)) / np.sqrt(n)


_ROUNDING = 1e-12
"""Share of an interval that is an error of floating-point arithmetic."""


def interval_text(value: float, low: float, high: float, n: int, digits: int = 3) -> str:
    """Write `120 [95, 160]`, or `120 (n = 2)` below `FEWEST`, or `120`, or `MISSING`.

    What rounding leaves of a zero within the interval is written 0.
    """
    is_zero = math.isfinite(high - low) and abs(value) < _ROUNDING * min(-low, high)
    text = significant(0.0 if is_zero else value, digits)
    if math.isnan(value):
        return text
    if n < FEWEST:
        return f"{text} (n = {n})"
    if math.isnan(low) or math.isnan(high):
        return text
    return f"{text} [{significant(low, digits)}, {significant(high, digits)}]"
