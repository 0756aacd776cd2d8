"""Cells into runs, and the runs launched: as a sweep of its own each time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from batchscape.launch import run_sweep
from batchscape.launch.result import SweepResult
from batchscape.launch.session import CutRule
from batchscape.plan.build import Prepare, make_plan
from batchscape.plan.expand import Cell, SweepCells
from batchscape.plan.machine import Machine
from batchscape.plan.table import write_plan
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec

__all__ = ["Launching", "key_of"]


@dataclass(frozen=True)
class Launching:
    """How the runs of a search are launched."""

    grid: SweepCells
    machine: Machine
    prepare: Prepare
    console: Console
    command: str

    def run(
        self,
        cells: Sequence[Cell],
        sweep: SweepFolder,
        cuts: Callable[[Mapping[str, RunSpec | None]], CutRule] | None = None,
    ) -> tuple[dict[str, RunSpec | None], SweepResult]:
        """Plan cells and run what is missing of them.

        Parameters
        ----------
        cells : sequence of Cell
        sweep : SweepFolder
        cuts : callable, optional
            Returns, for the runs of these cells, the rule that cuts some before their end.

        Returns
        -------
        specs : dict of str to RunSpec
            The run of each cell, by `key_of`; None where it is rejected.
        result : SweepResult
        """
        grid = replace(self.grid, cells=list(cells), intervals=())
        plan = replace(make_plan(grid, self.machine, self.prepare), sweep_dir=sweep.path)
        write_plan(plan)
        specs = {_key(cell.swept): cell.spec for cell in plan.cells}
        return specs, run_sweep(
            plan.specs,
            sweep,
            self.machine,
            console=self.console,
            command=self.command,
            cuts=None if cuts is None else cuts(specs),
        )


def key_of(cell: Cell) -> str:
    """Name a cell by its values."""
    return _key(cell.swept)


def _key(swept: dict[str, object]) -> str:
    return json.dumps(swept, sort_keys=True, default=str)
