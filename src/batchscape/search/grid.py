"""The measurement of a grid around the best of each study, with seeds that no trial had."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from batchscape.launch.result import SweepResult
from batchscape.plan.expand import Interval
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.trials import write_grid_results
from batchscape.search.launching import Launching
from batchscape.search.objective import outcome_of
from batchscape.search.space import Space, StudyCells
from batchscape.search.study import Study

_RATIO = 1.5
"""Ratio of two values of an interval that is tagged log."""
_MOST_WIDENED = 4
"""Number of times that a grid may grow on the side where its best is the last value."""
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


class _StudyGrid:
    """The grid of one study."""

    def __init__(self, space: Space, cells: StudyCells, study: Study) -> None:
        self._space, self._cells, self._trials = space, cells, study.finished
        first = space.first_seed + space.sampler.seeds
        self._seeds = range(first, first + space.sampler.grid_seeds)
        self._points: list[dict[str, Any]] = []
        if (best := study.best()) is not None:
            values = space.sampler.grid_points
            self._points = points_around(space.intervals, best.params, values, _RATIO)
        self.runs: list[list[RunSpec | str]] = []
        """Runs of each point; in place of a run the rule that it breaks."""
        self._values: list[list[float]] = []
        """Objective of each run of each point; empty where `problem` says why."""
        self.problem = "" if self._points else "no trial has a value to measure around"

    def plan(self, launching: Launching) -> None:
        """Plan the points that are new."""
        for point in self._points[len(self.runs) :]:
            self.runs.append(launching.plan([self._cells.at(point, seed) for seed in self._seeds]))

    def read(self, sweep: SweepFolder) -> None:
        """Read the objective of all points, infinite where a run has none."""
        if self._points:
            self.problem = ""
        outcomes = [
            [outcome_of([run], sweep, self._space.sampler.objective) for run in runs]
            for runs in self.runs
        ]
        self._values = [
            [outcome.value for outcome in of_point if outcome.value is not None]
            for of_point in outcomes
        ]
        for lost in (outcome for of_point in outcomes for outcome in of_point):
            if lost.value is None:
                retry = "; the same command with --retry failed,timeout goes on"
                text = f"the grid around the best is not whole: {lost.reason}"
                self.problem = text if lost.is_over else text + retry
                self._values = []

    def _means(self) -> list[float]:
        """Average the objective of each point over seeds."""
        return [math.fsum(by_seed) / len(by_seed) for by_seed in self._values]

    def _brackets(self) -> Iterator[tuple[Interval, Bracket]]:
        """Yield the bracket of each interval along the centre, where a value is finite."""
        if len(self._values) < 2:
            return
        centre = self._points[0]
        for interval in self._space.intervals:
            line = {
                point[interval.key]: mean
                for point, mean in zip(self._points, self._means(), strict=True)
                if {**point, interval.key: centre[interval.key]} == centre
            }
            if any(map(math.isfinite, line.values())):
                yield interval, bracket(line)

    def widen(self) -> bool:
        """Add points where a bracket is open; return whether there are any."""
        values = [
            {**self._points[0], interval.key: value}
            for interval, measured in self._brackets()
            for value in values_beyond(interval, measured, _RATIO)
        ]
        further = [point for point in values if point not in self._points]
        self._points += further
        return bool(further)

    def as_record(self) -> dict[str, Any]:
        """Return what `write_grid_results` writes; without points while they have no values."""
        points = (
            list(zip(self._points, self.runs, self._values, strict=True)) if self._values else []
        )
        return {
            "study": self._cells.name,
            "values": self._cells.values,
            "trials": self._trials,
            "points": [
                {
                    "point": point,
                    "seeds": {
                        str(seed): value if math.isfinite(value) else None
                        for seed, value in zip(self._seeds, by_seed, strict=True)
                    },
                    "runs": [run.run_id for run in runs if isinstance(run, RunSpec)],
                }
                for point, runs, by_seed in points
            ],
            "brackets": [
                {"key": interval.key, **best._asdict()} for interval, best in self._brackets()
            ],
        }


def measure_around(
    space: Space, studies: Mapping[str, Study], launching: Launching
) -> SweepResult | None:
    """Measure around the best trials, until the best of each grid has neighbours on both sides.

    Parameters
    ----------
    space : Space
    studies : mapping of str to Study
        By name; their trials are over.
    launching : Launching
        Of the grid.

    Returns
    -------
    SweepResult or None
        None where no grid is asked for, or no trial has a value.
    """
    if not space.sampler.grid_points:
        return None
    grids = {cells.name: _StudyGrid(space, cells, studies[cells.name]) for cells in space.studies}
    result = None
    for last in (False,) * _MOST_WIDENED + (True,):
        for grid in grids.values():
            grid.plan(launching)
        runs = [run for grid in grids.values() for of_point in grid.runs for run in of_point]
        if not runs:
            break
        specs = {run.run_id: run for run in runs if isinstance(run, RunSpec)}
        result = launching.launch(list(specs.values()))
        if result.interrupted or result.why_stopped is not None:
            return result
        for grid in grids.values():
            grid.read(launching.sweep)
        grown = [name for name, grid in grids.items() if not last and grid.widen()]
        if not grown:
            break
        text = f"The best is at the end of its grid, which grows: {', '.join(grown)}"
        launching.console.print(text, soft_wrap=True)
    rejected = dict.fromkeys(run for run in runs if isinstance(run, str))
    problems = [f"Rejected in the grid: {reason}" for reason in rejected]
    problems += [f"{name}: {grid.problem}" for name, grid in grids.items() if grid.problem]
    for line in problems:
        launching.console.print(line, soft_wrap=True)
    records = [grid.as_record() for grid in grids.values()]
    write_grid_results(launching.sweep.search, space.sampler.objective, records)
    return result
