"""Rules: what contrasts must show for a claim to hold, with every threshold fixed in advance.

A rule asks whether a mean difference lies above, below or within a bound, of *every* one of several
contrasts or of *some* of them, and of any such answers together:

* that *every* one holds is an intersection-union test (Berger 1982: no correction is needed for
  it; that one of them fails is tested at the level over their number);
* that *some* one holds is tested at the level over their number; that none does needs none;
* equality is shown by TOST (Schuirmann 1987: the 90 % interval lies inside the margin).

"Not significant" never decides anything: what neither interval settles is not identified. Neither
is what has fewer pairs than an interval is shown of (`estimates.FEWEST`): "every" and "none" hold
only where every comparison has so many. Equivalence alone asks for two, as in the report's tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol

from batchscape.analysis.comparing.pairs import Contrast
from batchscape.analysis.equivalence.tost import ALPHA, tost
from batchscape.analysis.estimates import FEWEST, LEVEL

__all__ = [
    "CONTRADICTED",
    "EQUIVALENCE_FEWEST",
    "OPEN",
    "SUPPORTED",
    "Answer",
    "Decision",
    "Test",
    "above",
    "below",
    "equal",
    "every",
    "some",
]

Answer = Literal["supported", "contradicted", "not identified"]
SUPPORTED: Answer = "supported"
CONTRADICTED: Answer = "contradicted"
OPEN: Answer = "not identified"

EQUIVALENCE_FEWEST = 2
"""Pairs from which two sides may be found equivalent, or not: a margin set beforehand leaves no
choice to make of so wide an interval."""


class Decision(NamedTuple):
    """What contrasts say to a rule, and the one that says it."""

    supports: float
    """How far the interval lies inside of what is asked for; above 0 it holds."""
    contradicts: float
    """How far it lies outside; above 0 it does not hold."""
    deciding: Contrast

    @property
    def answer(self) -> Answer:
        """Whether what is asked for holds."""
        if self.supports > 0:
            return SUPPORTED
        return CONTRADICTED if self.contradicts > 0 else OPEN


class Test(Protocol):
    """A question to contrasts; None where none has enough pairs."""

    def __call__(self, ways: int = 1, places: int = 1) -> Decision | None:
        """Answer it, as one of `ways` that support, and of `places` that contradict, on its own."""


def above(
    contrast: Contrast, threshold: float, *, sign: int = 1, told: Contrast | None = None
) -> Test:
    """Ask whether a mean lies above a threshold; with a sign of -1 below it.

    What is told of it is the size of another contrast, if there is one.
    """

    def test(ways: int = 1, places: int = 1) -> Decision | None:
        if len(contrast.values) < FEWEST:
            return None
        ends = [
            sorted(sign * (end - threshold) for end in contrast.interval(1 - (1 - LEVEL) / count))
            for count in (ways, places)
        ]
        return Decision(ends[0][0], -ends[1][1], told or contrast)

    return test


below = partial(above, sign=-1)


def equal(contrast: Contrast, margin: float, *, fewest: int = FEWEST) -> Test:
    """Ask whether a mean lies within a margin of zero."""

    def test(ways: int = 1, places: int = 1) -> Decision | None:
        if len(contrast.values) < fewest:
            return None
        narrow = tost(contrast.values, margin, ALPHA / ways)
        wide = tost(contrast.values, margin, ALPHA / 2 / places)
        inside = margin - narrow.smallest_margin
        return Decision(inside, max(wide.low, -wide.high) - margin, contrast)

    return test


def every(tests: Sequence[Test]) -> Test:
    """Ask whether all of some tests hold."""

    def test(ways: int = 1, places: int = 1) -> Decision | None:
        usable = [one for one in tests if one()]
        found = _found(usable, ways, places * len(usable))
        if not found:
            return None
        least = min(found, key=lambda one: one.supports)
        most = max(found, key=lambda one: one.contradicts)
        return Decision(
            least.supports if len(usable) == len(tests) else -math.inf,
            most.contradicts,
            (most if most.contradicts > 0 else least).deciding,
        )

    return test


def some(tests: Sequence[Test]) -> Test:
    """Ask whether one of some tests holds."""

    def test(ways: int = 1, places: int = 1) -> Decision | None:
        usable = [one for one in tests if one()]
        found = _found(usable, ways * len(usable), places)
        if not found:
            return None
        best = max(found, key=lambda one: one.supports)
        is_whole = len(usable) == len(tests)
        none = min(one.contradicts for one in found) if is_whole else -math.inf
        return Decision(best.supports, none, best.deciding)

    return test


def _found(tests: Sequence[Callable[..., Decision | None]], *shared: int) -> list[Decision]:
    return [found for one in tests if (found := one(*shared)) is not None]
