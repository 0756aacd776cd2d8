"""The grid that is measured around the best of a study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batchscape.plan.expand import Interval

__all__ = ["Bracket", "around", "beyond", "bracket"]

_DIGITS = 3
"""Significant digits of the values of a grid."""
_STEPS_A_RANGE = 10
"""Steps in an interval that is not logarithmic."""


class Bracket(NamedTuple):
    """Where the least of the measured values of one interval lies."""

    low: float | None
    """The next lower value that was measured; None: there is none."""
    best: float
    high: float | None
    """The next higher one."""


def around(
    intervals: Sequence[Interval], best: Mapping[str, Any], points: int, ratio: float
) -> list[dict[str, Any]]:
    """Return points around the best one: each interval by itself, the others held.

    Parameters
    ----------
    intervals : sequence of Interval
        No point leaves them.
    best : mapping
        The value of everything that is searched.
    points : int
        Values of each interval, the best among them.
    ratio : float
        Between neighbours of a logarithmic interval.
    """
    centre = dict(best)
    for interval in intervals:
        centre[interval.key] = _stepped(interval, best[interval.key], 0, ratio)
    found = [centre]
    for interval in intervals:
        for steps in range(-((points - 1) // 2), points // 2 + 1):
            value = _stepped(interval, best[interval.key], steps, ratio)
            point = {**centre, interval.key: value}
            if point not in found:
                found.append(point)
    return found


def bracket(losses: Mapping[float, float]) -> Bracket:
    """Return the best of the measured values of one interval, and its neighbours.

    Parameters
    ----------
    losses : mapping of float to float
        What is to be small, by value.
    """
    values = sorted(losses)
    place = min(range(len(values)), key=lambda index: losses[values[index]])
    return Bracket(
        values[place - 1] if place else None,
        values[place],
        values[place + 1] if place + 1 < len(values) else None,
    )


def beyond(interval: Interval, found: Bracket, ratio: float) -> list[float]:
    """Return up to two more values past each end at which the best has no measured neighbour.

    They lie within the interval: at its end there is nothing to add.
    """
    sides = [side for side, end in ((-1, found.low), (1, found.high)) if end is None]
    values = [
        _stepped(interval, found.best, side * steps, ratio) for side in sides for steps in (1, 2)
    ]
    return [value for value in dict.fromkeys(values) if value != found.best]


def _stepped(interval: Interval, value: float, steps: int, ratio: float) -> float:
    """Go some steps from a value, but not out of the interval."""
    low, high = interval.low, interval.high
    if interval.is_log:
        moved = value * ratio**steps
    else:
        moved = value + steps * (high - low) / _STEPS_A_RANGE
    if isinstance(low, int):
        # Neighbours of a small whole number are the next ones.
        moved = round(moved)
        if steps and moved == value:
            moved = round(value) + steps
        return min(max(moved, low), high)
    scale = abs(moved) if interval.is_log else (high - low) / _STEPS_A_RANGE
    rounded = 0.0 if moved == 0 else round(moved, _DIGITS - 1 - math.floor(math.log10(scale)))
    return min(max(rounded, low), high)
