"""Cells with the cost of a search, for a plan of it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from batchscape.plan.build import Prepare
from batchscape.plan.expand import SweepCells
from batchscape.plan.machine import Machine
from batchscape.search.launching import plan_at_corner
from batchscape.search.space import space_of
from batchscape.search.words import point_text, search_text
from batchscape.text import count_text


class StandIns(NamedTuple):
    """Cells with the cost of a search, and the description of the search."""

    text: str
    """Description of the search."""
    cells: SweepCells
    """One cell for each run, in the middle of every interval, unless a grid grows."""


def stand_ins(grid: SweepCells, machine: Machine, prepare: Prepare) -> StandIns:
    """Return cells with the cost of a search, and the description of the search.

    Parameters
    ----------
    grid : SweepCells
        As `space_of` takes it.
    machine : Machine
    prepare : callable
        As `plan.build.make_plan` takes them.
    """
    space = space_of(grid)
    sampler = space.sampler
    in_trials, in_grid = space.trials * sampler.seeds, space.grid_points * sampler.grid_seeds
    corner, _ = plan_at_corner(grid, machine, prepare)
    point = corner | {key: values[0] for key, values in space.choices.items()}
    first = space.first_seed
    cells = [
        study.at(point, seed)
        for study in space.studies
        for seed in range(first, first + in_trials + in_grid)
    ]
    studies = len(space.studies)
    text = (
        f"{search_text(space)}.\nIn all {count_text(len(cells), 'run')}: {studies * in_trials} of "
        f"trials, whose values are chosen on the way, and {studies * in_grid} of the grid around "
        f"the best. Planned as if each had {point_text(point)}."
    )
    return StandIns(text, replace(grid, cells=cells, intervals=()))
