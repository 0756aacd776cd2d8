"""Points of a search that are laid and not drawn: a grid, the first trials, ends and middles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from batchscape.plan.expand import Interval

if TYPE_CHECKING:
    from batchscape.search.space import Space

__all__ = [
    "FIRST_TRIALS",
    "corners_of",
    "grid_of",
    "grid_values_of",
    "spread_of",
    "trials_of",
]

FIRST_TRIALS = 4
"""Trials before a sampler has something to learn from."""


def trials_of(space: Space) -> int:
    """Return how many trials a study is to have: no more than there are points."""
    if space.sampler.name == "grid":
        return len(grid_of(space, space.sampler.trials))
    points = math.prod(len(values) for values in space.choices.values())
    for interval in space.intervals:
        is_whole = isinstance(interval.low, int)
        points *= int(interval.high - interval.low) + 1 if is_whole else space.sampler.trials
    return min(space.sampler.trials, points)


def grid_values_of(space: Space) -> int:
    """Return how many points are measured around each best, unless the grid grows."""
    points = space.sampler.grid_points
    if len(space.sampler.objective) > 1:
        return min(1, points)
    return len(space.intervals) * (points - 1) + 1 if points else 0


def corners_of(intervals: Sequence[Interval]) -> list[dict[str, float]]:
    """Return the middle of all intervals, by a number that is short, their low and high ends."""
    middle = {
        one.key: middle
        if isinstance(middle := _at(one, 0.5), int)
        else min(max(float(f"{middle:.2g}"), one.low), one.high)
        for one in intervals
    }
    return [middle, {one.key: one.low for one in intervals}, {i.key: i.high for i in intervals}]


def grid_of(space: Space, trials: int) -> list[dict[str, Any]]:
    """Return points at equal distances, their ends among them, as many as there are trials."""
    combinations = math.prod(len(values) for values in space.choices.values())
    count = len(space.intervals)
    each = int((trials / combinations) ** (1 / count) + 1e-9) if count else 1
    axes = [_between(interval, max(each, 1)) for interval in space.intervals]
    points = itertools.product(*axes, *space.choices.values())
    return [dict(zip(space.keys, point, strict=True)) for point in points]


def spread_of(space: Space, seed: int) -> list[dict[str, Any]]:
    """Return the first points, for samplers that learn: spread evenly, at random.

    Source: Sobol's sequence, scrambled (`scipy.stats.qmc`).
    """
    import numpy as np
    from scipy.stats.qmc import Sobol

    drawn = Sobol(len(space.keys), rng=np.random.default_rng(seed)).random(FIRST_TRIALS)
    points: list[dict[str, Any]] = []
    for shares in drawn.tolist():
        point: dict[str, Any] = {
            interval.key: _at(interval, share)
            for interval, share in zip(space.intervals, shares, strict=False)
        }
        chosen = zip(space.choices.items(), shares[len(space.intervals) :], strict=True)
        point |= {key: values[int(share * len(values))] for (key, values), share in chosen}
        if point not in points:
            points.append(point)
    return points


def _between(interval: Interval, count: int) -> list[float]:
    shares = [(n + 0.5) / count for n in range(count)]
    if count > 2:
        shares = [n / (count - 1) for n in range(count)]
    return list(dict.fromkeys(_at(interval, share) for share in shares))


def _at(interval: Interval, share: float) -> float:
    """Return the number that lies so far into an interval."""
    low, high = interval.low, interval.high
    value = low * (high / low) ** share if interval.is_log else low + share * (high - low)
    return round(value) if isinstance(low, int) else min(max(value, low), high)
