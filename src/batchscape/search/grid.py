"""The grid that is measured around the best of each study, with seeds that no trial had."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

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
from batchscape.search.study import Study

__all__ = ["measure_around"]

_RATIO = 1.5
"""Between two values of an interval that is tagged log."""
_MOST_WIDENED = 4
"""Times that a grid grows on the side where its best is the last."""


class _Around:
    """The grid of one study."""

    def __init__(self, space: Space, of: StudyCells, study: Study) -> None:
        self._space, self._of, self._trials = space, of, study.told
        self._is_front = len(space.sampler.objective) > 1
        values = min(1, space.sampler.grid_points) if self._is_front else space.sampler.grid_points
        self.points: list[dict[str, Any]] = []
        for trial in study.best() if values else ():
            near = around(space.intervals, trial.params, values, _RATIO)
            self.points += [point for point in near if point not in self.points]
        self.seeds: list[dict[int, tuple[float, ...]]] = []
        """Of each point its values by seed; empty where `why_not` says why."""
        self.why_not = (
            "" if self.points else "no trial has a value, so nothing is measured around it"
        )

    @property
    def cells(self) -> list[Cell]:
        """Those of all points."""
        return [cell for point in self.points for cell in self._by_seed(point).values()]

    def _by_seed(self, point: Mapping[str, Any]) -> dict[int, Cell]:
        first = self._space.first_seed + self._space.sampler.seeds
        seeds = range(first, first + self._space.sampler.grid_seeds)
        return {seed: self._of.at(point, seed) for seed in seeds}

    def read(self, runs: Mapping[str, RunSpec | str], sweep: SweepFolder) -> None:
        """Read what all points came to, infinite where a run has none."""
        self.seeds.clear()
        for point in self.points:
            values = {}
            for seed, cell in self._by_seed(point).items():
                outcome = outcome_of([runs[key_of(cell)]], sweep, self._space.sampler.objective)
                if outcome.values is None:
                    again = "; the same command with --retry failed,timeout goes on"
                    self.why_not = f"the grid around the best is not whole: {outcome.reason}"
                    self.why_not += "" if outcome.is_over else again
                    self.seeds.clear()
                    return
                values[seed] = outcome.values
            self.seeds.append(values)

    def _means(self) -> list[tuple[float, ...]]:
        """Average each objective of each point over seeds."""
        return [
            tuple(math.fsum(column) / len(column) for column in zip(*own.values(), strict=True))
            for own in self.seeds
        ]

    def _brackets(self) -> Iterator[tuple[Interval, Bracket]]:
        """Find the best values of each interval that were measured, the rest held, if any is."""
        if self._is_front or len(self.seeds) < 2:
            return
        centre = self.points[0]
        for interval in self._space.intervals:
            line = {
                point[interval.key]: mean
                for point, (mean, *_) in zip(self.points, self._means(), strict=True)
                if {**point, interval.key: centre[interval.key]} == centre
            }
            if any(map(math.isfinite, line.values())):
                yield interval, bracket(line)

    def widen(self) -> bool:
        """Add points where a bracket is open; whether there are any."""
        values = [
            {**self.points[0], interval.key: value}
            for interval, found in self._brackets()
            for value in beyond(interval, found, _RATIO)
        ]
        further = [point for point in values if point not in self.points]
        self.points += further
        return bool(further)

    def record(self, runs: Mapping[str, RunSpec | str]) -> dict[str, Any]:
        """Return what `write_measured` takes of this study."""
        on_front = unbeaten(self._means()) if self._is_front else [False] * len(self.seeds)
        measured = zip(self.points, self.seeds, on_front, strict=True) if self.seeds else ()
        return {
            "study": self._of.name,
            "values": self._of.values,
            "trials": self._trials,
            "points": [
                {
                    "point": point,
                    "seeds": {
                        str(seed): [value if math.isfinite(value) else None for value in values]
                        for seed, values in seeds.items()
                    },
                    "on_front": is_best,
                    "runs": [
                        run.run_id
                        for cell in self._by_seed(point).values()
                        if not isinstance(run := runs[key_of(cell)], str)
                    ],
                }
                for point, seeds, is_best in measured
            ],
            "brackets": [
                {"key": interval.key, **found._asdict()} for interval, found in self._brackets()
            ],
        }


def measure_around(
    space: Space, studies: Mapping[str, Study], sweep: SweepFolder, launching: Launching
) -> SweepResult | None:
    """Measure around the best trials, until the best of each grid has neighbours on both sides.

    Parameters
    ----------
    space : Space
    studies : mapping of str to Study
        By name; their trials are over.
    sweep : SweepFolder
        Where the grid is measured.
    launching : Launching

    Returns
    -------
    SweepResult or None
        None where there is nothing to measure around.
    """
    if not space.sampler.grid_points:
        return None
    console = launching.console
    grids = {of.name: _Around(space, of, studies[of.name]) for of in space.studies}
    runs: dict[str, RunSpec | str] = {}
    result = None
    for last in (False,) * _MOST_WIDENED + (True,):
        cells = [cell for grid in grids.values() for cell in grid.cells]
        if not cells:
            break
        plan, runs = launching.plan(cells, sweep)
        if plan is not None:
            write_plan(plan)
        result = launching.launch(() if plan is None else plan.specs, sweep)
        if result.interrupted or result.stopped is not None:
            return result
        for grid in grids.values():
            grid.read(runs, sweep)
        grown = [name for name, grid in grids.items() if not last and grid.widen()]
        if not grown:
            break
        console.print(
            f"The best is at the end of its grid, which grows: {', '.join(grown)}", soft_wrap=True
        )
    rejected = dict.fromkeys(run for run in runs.values() if isinstance(run, str))
    problems = [f"Rejected in the grid: {reason}" for reason in rejected]
    problems += [f"{name}: {grid.why_not}" for name, grid in grids.items() if grid.why_not]
    for line in problems:
        console.print(line, soft_wrap=True)
    records = [grid.record(runs) for grid in grids.values()]
    write_measured(sweep.search, space.sampler.objective, records)
    return result
