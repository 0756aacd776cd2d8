"""Fair readings of a headline that rests on a target, and what is shown where they disagree.

"Steps to a loss of 0.42" may be read in four ways, and a headline is computed under each:

* **for good**: from the crossing on every measured loss is at or below the target. It leads.
* **first crossing**: the first measurement that meets the target, of the same runs.
* **next easier target**: the next one up of the targets chosen, at its own learning rates.
* **each half of the seeds**: the lower half in order, and the rest.

A reading of all seeds disagrees where its value lies outside the headline's interval. A half has
the larger noise: it disagrees only where, besides, its own interval leaves out the headline's
value. A half without an interval (fewer than three seeds) tells nothing and is not read. Where the
noise of seeds is normal, 10 %, a half disagrees in 0, 0.4, 1.4 and 1.4 % of sweeps of 6, 8, 10 and
20 seeds; where the halves are a factor of three apart besides, in none of 6 seeds (the interval of
all is wider than that) and in all of 8 to 20 (2,000 sweeps a case, seed 1;
`tests/analysis/targets/test_readings.py` repeats a part).

Where one disagrees, the range over the readings stands in place of the interval. Where a reading
has no value but bounds that contradict the headline's interval, the headline is not identified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import FEWEST, NOT_IDENTIFIED, Estimate
from batchscape.analysis.numbers import significant

CROSSING_RULES = {
    "sustained": "crossing for good",
    "first": "first crossing",
    "first_evaluation": "first evaluation",
    "as given": "steps as the table gives them",
}
"""Names of crossings in texts."""

_WITHOUT_INTERVAL = 0.1
"""Share of the value by which readings may differ where too few seeds give no interval."""


@dataclass(frozen=True)
class Reading:
    """A headline by another reading of its words."""

    name: str
    """As in "at the first crossing"."""
    estimate: Estimate
    of_half: bool = False
    """Whether its runs are half of the seeds, whose noise is larger."""


def at_first_crossing(reaches: pd.DataFrame) -> pd.DataFrame | None:
    """Return the same runs with steps to their first crossing; None where it is not known."""
    first = reaches.get("first_steps_to_target")
    return None if first is None else reaches.assign(steps_to_target=first.astype(float))


def halves_of_seeds(reaches: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return the runs of the lower and the upper half of the seeds, of three seeds or more."""
    seeds = np.sort(reaches["seed"].dropna().unique())
    parts = np.split(seeds, [len(seeds) // 2])
    return [
        (f"by seeds {part[0]:g} to {part[-1]:g}", reaches[reaches["seed"].isin(part)])
        for part in parts
        if len(part) >= FEWEST
    ]


def under_readings(headline: Estimate, readings: Sequence[Reading]) -> Estimate:
    """Hold a headline against the other readings of its words.

    Parameters
    ----------
    headline : Estimate
        As the crossing that leads gives it.
    readings : sequence of Reading
        The others.

    Returns
    -------
    Estimate
        The headline where all agree; else with `readings`, whose range are `low` and `high`, and a
        note; or not identified, where bounds of a reading contradict it.
    """
    if not headline.is_identified:
        return headline
    low, high = headline.low, headline.high
    if math.isnan(low) or headline.n < FEWEST:
        factor = 1 + _WITHOUT_INTERVAL
        low, high = headline.value / factor, headline.value * factor
    identified = [reading for reading in readings if reading.estimate.is_identified]
    for reading in readings:
        other = reading.estimate
        is_apart = other.low > high or other.high < low
        if reading in identified or reading.of_half or not is_apart:
            continue
        side, end = ("least", other.low) if other.low > high else ("most", other.high)
        bound = f"at {side} {significant(end, 3)} {reading.name}"
        note = f"{NOT_IDENTIFIED}: {headline.text()} for good, but {bound}"
        return replace(headline, value=math.nan, low=math.nan, high=math.nan, note=note)
    # A half that agrees within its noise would only widen the range by it.
    apart = [
        r
        for r in identified
        if not low <= r.estimate.value <= high
        and not (r.of_half and r.estimate.low <= headline.value <= r.estimate.high)
    ]
    if not apart:
        return headline
    in_range = [r for r in identified if r in apart or not r.of_half]
    values = {"for good": headline.value, **{r.name: r.estimate.value for r in in_range}}
    listed = ", ".join(f"{significant(value, 3)} {name}" for name, value in values.items())
    return replace(
        headline,
        low=min(values.values()),
        high=max(values.values()),
        readings=tuple(values.items()),
        method="range over fair readings, in place of an interval",
        note="; ".join(filter(None, (headline.note, f"the readings differ: {listed}"))),
    )
