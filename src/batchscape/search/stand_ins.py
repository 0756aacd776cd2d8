"""Cells that cost what a search will: what a plan shows of it."""

from __future__ import annotations

from dataclasses import replace

from batchscape.plan.build import Prepare
from batchscape.plan.expand import SweepCells
from batchscape.plan.machine import Machine
from batchscape.search.launching import REJECTS, plan_at_corner
from batchscape.search.points import trials_of
from batchscape.search.space import space_of

__all__ = ["stand_ins"]


def stand_ins(grid: SweepCells, machine: Machine, prepare: Prepare) -> tuple[str, SweepCells]:
    """Return cells that cost what a search will, and what they stand for.

    Parameters
    ----------
    grid : SweepCells
        As `space_of` takes it.
    machine : Machine
    prepare : callable
        As `plan.build.make_plan` takes them.

    Returns
    -------
    text : str
        What the search will do.
    cells : SweepCells
        As many as there will be runs, each in the middle of every interval, unless a grid grows.
    """
    space = space_of(grid)
    sampler = space.sampler
    trials = trials_of(space)
    values = max(1, len(space.intervals) * (sampler.grid_points - 1) + 1)
    points = 0 if not sampler.grid_points else 1 if len(sampler.objective) > 1 else values
    corner = plan_at_corner(grid, machine, prepare)
    chosen = {key: values[0] for key, values in space.choices.items()}
    first = space.first_seed
    cells = [
        cell
        for study in space.studies
        for seed in range(first, first + trials * sampler.seeds + points * sampler.grid_seeds)
        for cell in study.at(corner.point | chosen, seed)
    ]
    around = (
        f", then a grid of {_count(points, 'value')} x {_count(sampler.grid_seeds, 'run')} around "
        "each best, more where it lies at the end of them"
    )
    text = (
        f"Search of {', '.join(space.keys)}: {_count(len(space.studies), 'study')} of "
        f"{_count(trials, 'trial')} x {_count(sampler.seeds, 'run')}{around if points else ''}. "
        "The runs below stand for these: the values are chosen on the way."
    )
    if corner.elsewhere is not None:
        text += f"\n{REJECTS} {corner.elsewhere}"
    return text, replace(grid, cells=cells, intervals=())


def _count(number: int, what: str) -> str:
    return f"{number} {what if number == 1 else 'studies' if what == 'study' else f'{what}s'}"
