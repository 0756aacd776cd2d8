"""The runs of a search: planned from cells, and launched as a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console

from batchscape.errors import ConfigError
from batchscape.launch.launcher import Launcher, Steering
from batchscape.launch.result import SweepResult
from batchscape.plan.build import Plan, PlannedCell, Prepare, make_plan
from batchscape.plan.expand import Cell, SweepCells
from batchscape.plan.machine import Machine
from batchscape.plan.table import write_plan
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.search.space import at_first_corner
from batchscape.search.words import point_text


@dataclass(frozen=True)
class Launching:
    """Plans and launches the runs of the trials, or of the grid."""

    grid: SweepCells
    corner: Plan
    """Plan of the cells of `grid` at a point where no rule is broken."""
    machine: Machine
    prepare: Prepare
    console: Console
    command: str
    searched: tuple[str, ...]
    """Keys whose values are shown beside each run."""
    sweep: SweepFolder
    cells: dict[str, PlannedCell] = field(default_factory=dict)
    """Planned cells, by name of the run."""
    values: dict[str, str] = field(default_factory=dict)
    """Text beside each run, by name."""

    def plan(self, cells: Sequence[Cell]) -> list[RunSpec | str]:
        """Return the run of each cell, or the rule that it breaks."""
        runs: list[RunSpec | str] = []
        for cell in cells:
            alone = replace(self.grid, cells=[cell], intervals=())
            try:
                plan = make_plan(alone, self.machine, self.prepare, may_be_empty=True)
            except ConfigError as error:
                runs.append(str(error))
                continue
            (planned,) = plan.cells
            self.cells[planned.run_id] = planned
            runs.append(planned.spec or str(planned.reason))
            point = {key.rpartition(".")[2]: cell.value_of_axis[key] for key in self.searched}
            self.values[planned.run_id] = point_text(point)
        if self.cells:
            all_cells = tuple(self.cells.values())
            write_plan(replace(self.corner, sweep_dir=self.sweep.path, cells=all_cells))
        return runs

    def launch(self, specs: Sequence[RunSpec], steering: Steering | None = None) -> SweepResult:
        """Launch the runs that are missing."""
        return Launcher(
            self.sweep,
            self.machine,
            specs,
            console=self.console,
            command=self.command,
            steering=steering,
            values=self.values,
        ).run()


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
        If a rule is broken in the middle and at both ends, or no cell can be launched.
    """
    return at_first_corner(
        grid, lambda cells: make_plan(replace(grid, cells=cells, intervals=()), machine, prepare)
    )
