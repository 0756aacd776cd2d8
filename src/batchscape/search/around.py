"""The grid that is measured around the best of a study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batchscape.plan.expand import Interval

_DIGITS = 3
"""Significant digits of the values of a grid."""
_STEPS_A_RANGE = 10
"""Steps in an interval that is not logarithmic."""


class Bracket(NamedTuple):
    """The best measured value of one interval, and its neighbours."""

    low: float | None
    """The next lower measured value; None where there is none."""
    best: float
    high: float | None
    """The next higher measured value; None where there is none."""


def points_around(
    intervals: Sequence[Interval], best: Mapping[str, Any], points: int, ratio: float
) -> list[dict[str, Any]]:
    """Return points around the best one that differ from it in one interval each.

    Parameters
    ----------
    intervals : sequence of Interval
        Limits of the points.
    best : mapping
        The searched values of the best trial.
    points : int
        Number of values of each interval, the best included.
    ratio : float
        Ratio of neighbours in a logarithmic interval.
    """
    centre = dict(best)
    for interval in intervals:
        centre[interval.key] = _step_from(interval, best[interval.key], 0, ratio)
    grid = [centre]
    for interval in intervals:
        for steps in range(-((points - 1) // 2), points // 2 + 1):
            value = _step_from(interval, best[interval.key], steps, ratio)
            point = {**centre, interval.key: value}
            if point not in grid:
                grid.append(point)
    return grid


def bracket(losses: Mapping[float, float]) -> Bracket:
    """Return the best of the measured values of one interval, and its neighbours.

    Parameters
    ----------
    losses : mapping of float to float
        Loss by value of the interval.
    """
    values = sorted(losses)
    place = min(range(len(values)), key=lambda index: losses[values[index]])
    return Bracket(
        values[place - 1] if place else None,
        values[place],
        values[place + 1] if place + 1 < len(values) else None,
    )


def values_beyond(interval: Interval, measured: Bracket, ratio: float) -> list[float]:
    """Return up to two more values on each side without a measured neighbour."""
    sides = [side for side, end in ((-1, measured.low), (1, measured.high)) if end is None]
    values = [
        _step_from(interval, measured.best, side * steps, ratio)
        for side in sides
        for steps in (1, 2)
    ]
    return [value for value in dict.fromkeys(values) if value != measured.best]


def _step_from(interval: Interval, value: float, steps: int, ratio: float) -> float:
    """Go some steps from a value, within the interval."""
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
