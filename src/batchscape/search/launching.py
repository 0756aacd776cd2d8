"""Cells into runs, and the runs launched: as a sweep of its own each time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console

from batchscape.errors import ConfigError
from batchscape.launch import run_sweep
from batchscape.launch.result import SweepResult
from batchscape.launch.session import Steering
from batchscape.plan.build import Plan, Prepare, make_plan
from batchscape.plan.expand import Cell, SweepCells
from batchscape.plan.machine import Machine
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.search.space import at_first_corner
from batchscape.search.words import point_text

__all__ = ["Launching", "key_of", "plan_at_corner"]


@dataclass(frozen=True)
class Launching:
    """How the runs of a search are launched."""

    grid: SweepCells
    machine: Machine
    prepare: Prepare
    console: Console
    command: str
    concurrent_runs: int
    searched: tuple[str, ...]
    """Keys whose values are shown beside each run."""
    values: dict[str, str] = field(default_factory=dict)
    """Those of each run that was planned, by name."""

    def plan(
        self, cells: Sequence[Cell], sweep: SweepFolder
    ) -> tuple[Plan | None, dict[str, RunSpec | str]]:
        """Plan cells, of which some or all may be rejected.

        Parameters
        ----------
        cells : sequence of Cell
        sweep : SweepFolder

        Returns
        -------
        plan : Plan or None
            Without the cells that break a rule of the settings; None where all of them do.
        runs : dict of str to RunSpec or str
            The run of each cell, by `key_of`, or the reason why there is none. Two cells that are
            one training have one run.
        """
        sound, runs = list(cells), dict[str, RunSpec | str]()
        try:
            plan = self._planned(sound, sweep)
        except ConfigError:
            sound = []
            for cell in cells:
                try:
                    plan = self._planned([cell], sweep)
                    sound.append(cell)
                except ConfigError as error:
                    runs[key_of(cell)] = str(error)
            if not sound:
                return None, runs
            plan = self._planned(sound, sweep)
        found = {cell.run_id: cell for cell in plan.cells}
        for cell, run in zip(sound, plan.run_ids, strict=True):
            runs[key_of(cell)] = found[run].spec or str(found[run].reason)
            point = {key.rpartition(".")[2]: cell.swept[key] for key in self.searched}
            self.values[run] = point_text(point)
        return plan, runs

    def _planned(self, cells: Sequence[Cell], sweep: SweepFolder) -> Plan:
        grid = replace(self.grid, cells=list(cells), intervals=())
        plan = make_plan(grid, self.machine, self.prepare, may_be_empty=True)
        return replace(plan, sweep_dir=sweep.path)

    def launch(
        self, specs: Sequence[RunSpec], sweep: SweepFolder, steering: Steering | None = None
    ) -> SweepResult:
        """Run what is missing."""
        return run_sweep(
            specs,
            sweep,
            self.machine,
            console=self.console,
            command=self.command,
            steering=steering,
            values=self.values,
        )


def plan_at_corner(
    grid: SweepCells, machine: Machine, prepare: Prepare
) -> tuple[dict[str, float], Plan]:
    """Plan the cells of a search at the first point where they can be launched.

    Parameters
    ----------
    grid : SweepCells
        Of a search; each cell with the low ends of its intervals.
    machine : Machine
    prepare : callable

    Raises
    ------
    ConfigError
        If a rule is broken in the middle and at both ends, or no cell at all can be launched.
    """
    return at_first_corner(
        grid, lambda cells: make_plan(replace(grid, cells=cells, intervals=()), machine, prepare)
    )


def key_of(cell: Cell) -> str:
    """Name a cell by its values."""
    return json.dumps(cell.swept, sort_keys=True, default=str)
