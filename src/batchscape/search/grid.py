"""The grid that is measured around the best of each study, with seeds that no trial had."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from batchscape.launch.result import SweepResult
from batchscape.plan.expand import Cell, Interval
from batchscape.plan.table import write_plan
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.trials import write_measured
from batchscape.search.around import Bracket, around, beyond, bracket
from batchscape.search.launching import Launching, key_of
from batchscape.search.objective import outcome_of, unbeaten
from batchscape.search.space import Space, StudyCells
from batchscape.search.words import point_text
from batchscape.text import count_text, list_text

__all__ = ["MeasuredPoint", "measure_around"]

_RATIO = 1.5
"""Between two values of an interval that is tagged log."""
_MOST_WIDENED = 4
"""Times that a grid grows on the side where its best is the last."""


class MeasuredPoint(NamedTuple):
    """A point that has a value."""

    point: dict[str, Any]
    """Its searched values, by key."""
    values: tuple[float, ...]
    """Of each objective."""
    seeds: Mapping[int, tuple[float, ...]] = MappingProxyType({})
    """The same, by seed."""


class _Best(NamedTuple):
    """The best of the values of one interval that were measured, the rest held."""

    interval: Interval
    bracket: Bracket
    value: float
    """Of the objective there."""
    measured: int
    """Values that have a result."""


class _Around:
    """The grid of one study."""

    def __init__(
        self, space: Space, of: StudyCells, best: Sequence[MeasuredPoint], trials: int
    ) -> None:
        sampler = space.sampler
        self._trials = trials
        count = sampler.grid_points if len(sampler.objective) == 1 else min(1, sampler.grid_points)
        self._space, self._of = space, of
        self.points: list[dict[str, Any]] = []
        for one in best if count else ():
            near = around(space.intervals, one.point, count, _RATIO)
            self.points += [point for point in near if point not in self.points]

    def cells(self) -> list[list[Cell]]:
        """Return the cells of each point."""
        return [list(self._by_seed(point).values()) for point in self.points]

    def _by_seed(self, point: Mapping[str, Any]) -> dict[int, Cell]:
        first = self._space.first_seed + self._space.sampler.seeds
        seeds = range(first, first + self._space.sampler.grid_seeds)
        return {seed: self._of.at(point, seed) for seed in seeds}

    def measured(
        self, runs: Mapping[str, RunSpec | str], sweep: SweepFolder
    ) -> list[MeasuredPoint] | str:
        """Return each point with its means, infinite where a seed has none; or why it cannot."""
        if not self.points:
            return "no trial has a value, so nothing is measured around it"
        found = []
        for point in self.points:
            seeds = {}
            for seed, cell in self._by_seed(point).items():
                outcome = outcome_of([runs[key_of(cell)]], sweep, self._space.sampler.objective)
                if outcome.values is None:
                    again = "; the same command with --retry failed,timeout goes on"
                    return f"{outcome.reason}{'' if outcome.is_over else again}"
                seeds[seed] = outcome.values
            columns = zip(*seeds.values(), strict=True)
            means = tuple(math.fsum(column) / len(seeds) for column in columns)
            found.append(MeasuredPoint(point, means, seeds))
        return found

    def record(
        self, found: Sequence[MeasuredPoint] | str, runs: Mapping[str, RunSpec | str]
    ) -> dict[str, Any]:
        """Return what `write_measured` takes of this study."""
        is_front = len(self._space.sampler.objective) > 1
        whole = () if isinstance(found, str) else found
        on_front = unbeaten([one.values for one in whole]) if is_front else [False] * len(whole)
        return {
            "study": self._of.name,
            "values": self._of.values,
            "trials": self._trials,
            "why_not": found if isinstance(found, str) else None,
            "points": [
                {
                    "point": one.point,
                    "seeds": {
                        str(seed): [value if math.isfinite(value) else None for value in values]
                        for seed, values in one.seeds.items()
                    },
                    "on_front": is_best,
                    "runs": [
                        run.run_id
                        for cell in self._by_seed(one.point).values()
                        if not isinstance(run := runs[key_of(cell)], str)
                    ],
                }
                for one, is_best in zip(whole, on_front, strict=True)
            ],
            "brackets": [
                {"key": best.interval.key, **best.bracket._asdict()}
                for best in (self.brackets(whole) if len(whole) > 1 and not is_front else ())
            ],
        }

    def brackets(self, found: Sequence[MeasuredPoint]) -> list[_Best]:
        """Return where the best of each interval lies."""
        centre, best = self.points[0], []
        for interval in self._space.intervals:
            line = {
                point[interval.key]: value
                for point, (value, *_), _ in found
                if {**point, interval.key: centre[interval.key]} == centre
            }
            of = bracket(line)
            known = sum(map(math.isfinite, line.values()))
            best.append(_Best(interval, of, line[of.best], known))
        return best

    def widen(self, found: Sequence[MeasuredPoint]) -> bool:
        """Add points where a bracket is open; whether there are any."""
        before = len(self.points)
        for interval, of, value, _ in self.brackets(found):
            # Where nothing has a value there is no side to go to.
            for further in beyond(interval, of, _RATIO) if math.isfinite(value) else ():
                point = {**self.points[0], interval.key: further}
                if point not in self.points:
                    self.points.append(point)
        return len(self.points) > before


def measure_around(
    space: Space,
    best: Mapping[str, Sequence[MeasuredPoint]],
    trials: Mapping[str, int],
    sweep: SweepFolder,
    launching: Launching,
) -> SweepResult | None:
    """Measure around the best trials, until the best of each grid has neighbours on both sides.

    Parameters
    ----------
    space : Space
    best : mapping of str to sequence of MeasuredPoint
        The best trial of each study, or those of its front.
    trials : mapping of str to int
        Of each study, how many there were.
    sweep : SweepFolder
        Where the grid is measured.
    launching : Launching

    Returns
    -------
    SweepResult or None
        None where there is nothing to measure around.
    """
    console, is_front = launching.console, len(space.sampler.objective) > 1
    grids = {of.name: _Around(space, of, best[of.name], trials[of.name]) for of in space.studies}
    for name, own in best.items():
        console.print(_trials_text(name, space, own), soft_wrap=True)
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
        found = {name: grid.measured(runs, sweep) for name, grid in grids.items()}
        # One value was asked for where the best is to be measured, and nothing around it.
        may_grow = not (last or is_front) and space.sampler.grid_points > 1
        grown = [
            name
            for name, told in found.items()
            if may_grow and not isinstance(told, str) and grids[name].widen(told)
        ]
        if not grown:
            break
        console.print(
            f"The best is at the end of its grid, which grows: {', '.join(grown)}", soft_wrap=True
        )
    for reason in dict.fromkeys(run for run in runs.values() if isinstance(run, str)):
        console.print(f"Rejected in the grid: {reason}", soft_wrap=True)
    for name, told in found.items():
        # Of a study without a best trial that was said before.
        for line in _result_lines(name, space, grids[name], told) if best[name] else ():
            console.print(line, soft_wrap=True)
    records = [grids[name].record(told, runs) for name, told in found.items()]
    write_measured(sweep.search, space.sampler.objective, records)
    return result


def _trials_text(name: str, space: Space, best: Sequence[MeasuredPoint]) -> str:
    """Say what the trials of a study came to."""
    if not best:
        return f"{name}: no trial has a value, so nothing is measured around it"
    if len(space.sampler.objective) > 1:
        return _front_text(name, space, best, "by the trials")
    return f"{name}: the best trial has {point_text(best[0].point)}, {_values_text(space, best[0])}"


def _result_lines(
    name: str, space: Space, grid: _Around, found: Sequence[MeasuredPoint] | str
) -> Iterator[str]:
    """Say what a study came to."""
    sampler = space.sampler
    if isinstance(found, str):
        yield f"{name}: the grid around the best is not whole: {found}"
    elif len(sampler.objective) > 1:
        yield _front_text(name, space, found, _fresh_text(space))
    elif not space.intervals:
        (only,) = found
        has_value = math.isfinite(only.values[0])
        came_to = f"{_values_text(space, only)} ({_fresh_text(space)})"
        yield (
            f"{name}: best by {sampler.objective[0]}: {point_text(only.point)}, which the trials "
            f"chose; {came_to if has_value else 'with fresh seeds it has no result'}"
        )
    else:
        for best in grid.brackets(found):
            yield f"{name}: {_best_text(best, space, grid.points[0])}"


def _best_text(best: _Best, space: Space, centre: Mapping[str, Any]) -> str:
    key, objective = best.interval.key, space.sampler.objective[0]
    if not math.isfinite(best.value):
        return f"no value of {key} that was measured has a result"
    held = point_text({other: value for other, value in centre.items() if other != key})
    told = f"best {key} by {objective}{f' with {held}' if held else ''}: {best.bracket.best:g}"
    least = f", the least of {best.measured} values" if best.measured > 1 else ""
    of = f"{objective} {best.value:.4g} ({_fresh_text(space)})"
    return f"{told}, {_bracket_text(best)}; {of}{least}"


def _bracket_text(best: _Best) -> str:
    low, value, high = best.bracket
    if low is not None and high is not None:
        return f"bracketed (not better at {low:g} and {high:g})"
    if value == (best.interval.low if low is None else best.interval.high):
        return "not bracketed (it is the end of the interval, so widen the interval)"
    side = "beside" if low is None and high is None else "below" if low is None else "above"
    return f"not bracketed (nothing {side} it was measured)"


def _front_text(name: str, space: Space, found: Sequence[MeasuredPoint], how: str) -> str:
    """Say how many points a front has, and its ends."""
    valid = [one for one in found if all(map(math.isfinite, one.values))]
    kept = itertools.compress(valid, unbeaten([one.values for one in valid]))
    front = sorted(kept, key=lambda one: one.values)
    told = f"{name}: front of {list_text(space.sampler.objective, 'and')} ({how})"
    if not front:
        return f"{told}: no point has a result"
    ends = dict.fromkeys(
        f"{_values_text(space, one)} at {point_text(one.point)}" for one in (front[0], front[-1])
    )
    return f"{told}: {count_text(len(front), 'point')}, {' to '.join(ends)}"


def _fresh_text(space: Space) -> str:
    fresh = count_text(space.sampler.grid_seeds, "fresh seed")
    return fresh if space.sampler.grid_seeds == 1 else f"mean of {fresh}"


def _values_text(space: Space, found: MeasuredPoint) -> str:
    named = zip(space.sampler.objective, found.values, strict=True)
    return ", ".join(f"{name} {value:.4g}" for name, value in named)
