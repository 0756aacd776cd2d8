"""Rules: tests of contrasts that decide a claim, with every threshold fixed in advance.

A rule asks whether a mean difference lies above, below or within a bound, of *every* one of several
contrasts or of *some* of them, and of any such answers together:

* that *every* one holds is an intersection-union test (Berger 1982: no correction is needed for
  it; that one of them fails is tested at the level over their number);
* that *some* one holds is tested at the level over their number; that none does needs none;
* equality is shown by TOST (Schuirmann 1987: the 90 % interval lies inside the margin).

"Not significant" never decides anything: where neither interval settles a claim, it is not
identified. Comparisons with fewer pairs than `estimates.FEWEST` are not identified either: "every"
and "none" hold only where every comparison has so many. Equivalence alone needs two, as in the
report's tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from batchscape.analysis.comparing.pairs import Contrast
from batchscape.analysis.equivalence.tost import ALPHA, tost
from batchscape.analysis.estimates import FEWEST, LEVEL

Answer = Literal["supported", "contradicted", "not identified"]
SUPPORTED: Answer = "supported"
CONTRADICTED: Answer = "contradicted"
OPEN: Answer = "not identified"

EQUIVALENCE_FEWEST = 2
"""Pairs from which two sides may be found equivalent, or not: a margin set beforehand leaves no
choice to make of so wide an interval."""


class Decision(NamedTuple):
    """The outcome of a test, and the contrast that decides it."""

    supports: float
    """Distance of the interval inside the tested range; above 0 the test holds."""
    contradicts: float
    """Distance of the interval outside the range; above 0 the test fails."""
    deciding: Contrast

    @property
    def answer(self) -> Answer:
        """The answer of the test."""
        if self.supports > 0:
            return SUPPORTED
        return CONTRADICTED if self.contradicts > 0 else OPEN


Test = Callable[..., "Decision | None"]
"""A test of contrasts at the level over `ways` (by default 1) to support and over `places` (1) to
contradict a claim; None where no contrast has enough pairs."""


def above(
    contrast: Contrast, threshold: float, *, sign: int = 1, reported: Contrast | None = None
) -> Test:
    """Test whether a mean lies above (sign -1: below) a threshold; `reported` has another size."""

    def test(ways: int = 1, places: int = 1) -> Decision | None:
        if len(contrast.values) < FEWEST:
            return None
        ends = [
            sorted(sign * (end - threshold) for end in contrast.interval(1 - (1 - LEVEL) / count))
            for count in (ways, places)
        ]
        return Decision(ends[0][0], -ends[1][1], reported or contrast)

    return test


below = partial(above, sign=-1)


def equal(contrast: Contrast, margin: float, *, fewest: int = FEWEST) -> Test:
    """Test whether a mean lies within a margin of zero."""

    def test(ways: int = 1, places: int = 1) -> Decision | None:
        if len(contrast.values) < fewest:
            return None
        narrow = tost(contrast.values, margin, ALPHA / ways)
        wide = tost(contrast.values, margin, ALPHA / 2 / places)
        inside = margin - narrow.smallest_margin
        return Decision(inside, max(wide.low, -wide.high) - margin, contrast)

    return test


def within_factor(contrast: Contrast, factor: float) -> Test:
    """Test whether a ratio that a topic estimates lies within a factor of 1."""

    def test(ways: int = 1, places: int = 1) -> Decision | None:
        del ways, places  # a topic's interval has one level
        if len(contrast.values) < FEWEST:
            return None
        with np.errstate(divide="ignore"):
            low, high = np.log(contrast.interval(LEVEL)) / math.log(factor)
        return Decision(1 - max(high, -low), max(low, -high) - 1, contrast)

    return test


def every(tests: Sequence[Test]) -> Test:
    """Test whether all of several tests hold."""

    def test(ways: int = 1, places: int = 1) -> Decision | None:
        usable = [each for each in tests if each()]
        decisions = [each(ways, places * len(usable)) for each in usable]
        least = min(filter(None, decisions), key=lambda each: _known(each.supports), default=None)
        most = max(filter(None, decisions), key=lambda each: _known(each.contradicts), default=None)
        if least is None or most is None:
            return None
        return Decision(
            least.supports if len(usable) == len(tests) else -math.inf,
            most.contradicts,
            (most if most.contradicts > 0 else least).deciding,
        )

    return test


def some(tests: Sequence[Test]) -> Test:
    """Test whether one of several tests holds."""

    def test(ways: int = 1, places: int = 1) -> Decision | None:
        usable = [each for each in tests if each()]
        decisions = [*filter(None, (each(ways * len(usable), places) for each in usable))]
        if not decisions:
            return None
        best = max(decisions, key=lambda decision: _known(decision.supports))
        is_complete = len(usable) == len(tests)
        none = min(_known(each.contradicts) for each in decisions) if is_complete else -math.inf
        return Decision(best.supports, none, best.deciding)

    return test


def _known(distance: float) -> float:
    """Return a distance; of ends that an infinite difference leaves unknown nothing holds."""
    return -math.inf if math.isnan(distance) else distance
