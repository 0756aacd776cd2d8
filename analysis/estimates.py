"""An estimate: a number with its interval, its n, its method, or the reason why it has none."""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchscape.analysis.numbers import significant

__all__ = ["LEVEL", "NOT_IDENTIFIED", "Estimate"]

LEVEL = 0.95
"""Coverage that every interval aims at, unless it says otherwise."""

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
            As in `120 [95, 160]`, `120 [95, ∞]`, `120`, or `not identified (≥ 80)`.
        """
        if not self.is_identified:
            least = f" (≥ {significant(self.low, digits)})" if self.low > 0 else ""
            return NOT_IDENTIFIED + least
        if math.isnan(self.low) or math.isnan(self.high):
            return significant(self.value, digits)
        ends = f"{significant(self.low, digits)}, {significant(self.high, digits)}"
        return f"{significant(self.value, digits)} [{ends}]"
