"""Cells that cost what a search will: what a plan shows of it."""

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

__all__ = ["StandIns", "stand_ins"]


class StandIns(NamedTuple):
    """Cells that cost what a search will, and what they stand for."""

    text: str
    """What the search will do."""
    cells: SweepCells
    """As many as there will be runs, each in the middle of every interval, unless a grid grows."""
    searched: tuple[str, ...]
    """Keys whose values are chosen on the way."""
    trials: int
    """Of each study."""


def stand_ins(grid: SweepCells, machine: Machine, prepare: Prepare) -> StandIns:
    """Return cells that cost what a search will, and what they stand for.

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
    asked, measured = space.trials * sampler.seeds, space.grid_points * sampler.grid_seeds
    corner, _ = plan_at_corner(grid, machine, prepare)
    point = corner | {key: values[0] for key, values in space.choices.items()}
    first = space.first_seed
    cells = [
        study.at(point, seed)
        for study in space.studies
        for seed in range(first, first + asked + measured)
    ]
    each = len(space.studies)
    after = "the grid around the best" if len(sampler.objective) == 1 else "a trial of each front"
    text = (
        f"{search_text(space)}.\nIn all {count_text(len(cells), 'run')}: {each * asked} of trials, "
        f"whose values are chosen on the way, and {each * measured} of {after}. "
        f"Planned as if each had {point_text(point)}."
    )
    return StandIns(text, replace(grid, cells=cells, intervals=()), space.keys, space.trials)
