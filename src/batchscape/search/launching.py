"""Cells into runs, and the runs launched: as a sweep of its own each time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from batchscape.launch import run_sweep
from batchscape.launch.result import SweepResult
from batchscape.launch.session import Steering
from batchscape.plan.build import Plan, Prepare, make_plan
from batchscape.plan.expand import Cell, SweepCells
from batchscape.plan.machine import Machine
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec

__all__ = ["Launching", "key_of", "specs_of"]


@dataclass(frozen=True)
class Launching:
    """How the runs of a search are launched."""

    grid: SweepCells
    machine: Machine
    prepare: Prepare
    console: Console
    command: str

    def plan(self, cells: Sequence[Cell], sweep: SweepFolder) -> Plan:
        """Plan cells, of which all may be rejected."""
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
        )


def specs_of(plan: Plan, cells: Sequence[Cell]) -> dict[str, RunSpec | None]:
    """Return the run of each cell that was planned, by `key_of`; None where it is rejected.

    Two cells that are one training have one run.
    """
    specs = {cell.run_id: cell.spec for cell in plan.cells}
    return {key_of(cell): specs[run] for cell, run in zip(cells, plan.run_ids, strict=True)}


def key_of(cell: Cell) -> str:
    """Name a cell by its values."""
    return json.dumps(cell.swept, sort_keys=True, default=str)
