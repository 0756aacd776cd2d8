"""The grid that is measured around the best of each study, with seeds that no trial had."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from batchscape.launch.result import SweepResult
from batchscape.plan.expand import Cell, Interval
from batchscape.plan.table import write_plan
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.trials import write_measured
from batchscape.search.around import Bracket, around, beyond, bracket
from batchscape.search.launching import Launching, key_of
from batchscape.search.objective import outcome_of
from batchscape.search.space import Space, StudyCells

__all__ = ["measure_around"]

_MOST_WIDENED = 4
"""Times that a grid grows on the side where its best is the last."""


class _Around:
    """The grid of one study."""

    def __init__(self, space: Space, of: StudyCells, best: Sequence[Mapping[str, Any]]) -> None:
        sampler = space.sampler
        count = sampler.grid_points if len(sampler.objective) == 1 else min(1, sampler.grid_points)
        self._space, self._of = space, of
        self.points = [
            point
            for one in best
            for point in around(space.intervals, one, count, sampler.grid_ratio)
            if count
        ]

    def cells(self) -> list[list[Cell]]:
        """Return the cells of each point."""
        first = self._space.first_seed + self._space.sampler.seeds
        seeds = range(first, first + self._space.sampler.grid_seeds)
        return [[c for seed in seeds for c in self._of.at(p, seed)] for p in self.points]

    def rows(
        self, runs: Mapping[str, RunSpec | str], sweep: SweepFolder
    ) -> Iterator[dict[str, Any]]:
        """Say what each run came to."""
        sampler = self._space.sampler
        for point, cells in zip(self.points, self.cells(), strict=True):
            for cell in cells:
                run = runs[key_of(cell)]
                outcome = outcome_of([run], sweep, sampler.objective)
                values = outcome.values or (None,) * len(sampler.objective)
                yield {
                    "study": self._of.name,
                    "seed": cell.swept["seed"],
                    **{key: point[key] for key in self._space.keys},
                    **dict(zip(sampler.objective, values, strict=True)),
                    "outcome": outcome.state,
                    "run": "" if isinstance(run, str) else run.run_id,
                }

    def brackets(
        self, runs: Mapping[str, RunSpec | str], sweep: SweepFolder
    ) -> list[tuple[Interval, Bracket, float]] | None:
        """Return where the best of each interval lies, and its mean; None: not all is measured."""
        values = [self._mean(cells, runs, sweep) for cells in self.cells()]
        if None in values:
            return None
        centre, found = self.points[0], []
        for interval in self._space.intervals:
            line = {
                point[interval.key]: value
                for point, value in zip(self.points, values, strict=True)
                if value is not None and {**point, interval.key: centre[interval.key]} == centre
            }
            best = bracket(line)
            found.append((interval, best, line[best.best]))
        return found

    def widen(self, brackets: Sequence[tuple[Interval, Bracket, float]]) -> bool:
        """Add points where a bracket is open; whether there are any."""
        before, ratio = len(self.points), self._space.sampler.grid_ratio
        for interval, found, mean in brackets:
            # Where nothing has a value there is no side to go to.
            for value in beyond(interval, found, ratio) if math.isfinite(mean) else ():
                point = {**self.points[0], interval.key: value}
                if point not in self.points:
                    self.points.append(point)
        return len(self.points) > before

    def _mean(
        self, cells: Sequence[Cell], runs: Mapping[str, RunSpec | str], sweep: SweepFolder
    ) -> float | None:
        """Return the mean over the seeds, infinite where one has no value; None: not measured."""
        found = [runs[key_of(cell)] for cell in cells]
        outcome = outcome_of(found, sweep, self._space.sampler.objective)
        return None if outcome.values is None else outcome.values[0]


def measure_around(
    space: Space,
    best: Mapping[str, Sequence[Mapping[str, Any]]],
    sweep: SweepFolder,
    launching: Launching,
) -> SweepResult | None:
    """Measure around the best trials, until the best of each grid has neighbours on both sides.

    Parameters
    ----------
    space : Space
    best : mapping of str to sequence of mapping
        Searched values of the best trial of each study, or of its front.
    sweep : SweepFolder
        Where the grid is measured.
    launching : Launching

    Returns
    -------
    SweepResult or None
        None where there is nothing to measure around.
    """
    console = launching.console
    grids = {of.name: _Around(space, of, best[of.name]) for of in space.studies if best[of.name]}
    _tell_trials(space, best, console)
    if not any(grid.points for grid in grids.values()):
        return None
    for last in (False,) * _MOST_WIDENED + (True,):
        cells = [c for grid in grids.values() for of in grid.cells() for c in of]
        plan, runs = launching.plan(cells, sweep)
        if plan is not None:
            write_plan(plan)
        result = launching.launch(() if plan is None else plan.specs, sweep)
        if result.interrupted or result.stopped is not None:
            return result
        write_measured(
            sweep.search, (row for grid in grids.values() for row in grid.rows(runs, sweep))
        )
        if len(space.sampler.objective) > 1:
            return result
        found = {name: grid.brackets(runs, sweep) for name, grid in grids.items()}
        # One value was asked for where the best is to be measured, and nothing around it.
        may_grow = not last and space.sampler.grid_points > 1
        grown = [name for name, own in found.items() if may_grow and own and grids[name].widen(own)]
        if not grown:
            break
        console.print(
            f"The best is at the end of its grid, which grows: {', '.join(grown)}", soft_wrap=True
        )
    for reason in dict.fromkeys(run for run in runs.values() if isinstance(run, str)):
        console.print(f"Rejected in the grid: {reason}", soft_wrap=True)
    _tell(space, found, console)
    return result


def _tell_trials(
    space: Space, best: Mapping[str, Sequence[Mapping[str, Any]]], console: Console
) -> None:
    """Say what the trials found."""
    for of in space.studies:
        if not best[of.name]:
            console.print(f"{of.name}: no trial has a value, so nothing is measured around it")
        for point in best[of.name]:
            at = ", ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
                for key, value in point.items()
            )
            what = "the best trial" if len(space.sampler.objective) == 1 else "a trial of the front"
            console.print(f"{of.name}: {what} has {at}", soft_wrap=True)


def _tell(
    space: Space,
    found: Mapping[str, Sequence[tuple[Interval, Bracket, float]] | None],
    console: Console,
) -> None:
    """Say where the best of each study lies."""
    for name, brackets in found.items():
        if brackets is None:
            console.print(
                f"{name}: the grid around the best is not whole, since runs of it ended by a "
                "fault; the same command with --retry failed,timeout goes on"
            )
        for interval, around_best, value in brackets or ():
            console.print(_text(name, interval, around_best, value, space), soft_wrap=True)


def _text(name: str, interval: Interval, found: Bracket, value: float, space: Space) -> str:
    said = f"{name}: {interval.key} = {found.best:g}, {space.sampler.objective[0]} {value:.4g}"
    seeds = space.sampler.grid_seeds
    mean = "one fresh seed" if seeds == 1 else f"mean of {seeds} fresh seeds"
    said += f" ({mean}, the least of the grid's)"
    if not math.isfinite(value):
        return f"{name}: no value of {interval.key} that was measured has a result"
    if found.low is not None and found.high is not None:
        return f"{said}; not better at {found.low:g} and {found.high:g}"
    side = "below" if found.low is None else "above"
    end = interval.low if found.low is None else interval.high
    if found.best == end:
        return f"{said}; not bracketed: it is the end of the interval, so widen the interval"
    return f"{said}; not bracketed: nothing {side} it was measured"
