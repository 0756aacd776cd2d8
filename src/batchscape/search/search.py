"""The search itself: trials of all studies side by side, then the grids around their best."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from batchscape.config import Data
from batchscape.errors import ConfigError, LaunchError
from batchscape.launch.result import SweepResult
from batchscape.plan.build import Prepare
from batchscape.plan.expand import SweepCells
from batchscape.plan.machine import Machine
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import FORMAT_VERSION, SweepFolder
from batchscape.record.locks import take
from batchscape.record.spec import DataIdentity
from batchscape.search.grid import measure_around
from batchscape.search.launching import Launching, plan_at_corner
from batchscape.search.space import Space, space_of
from batchscape.search.study import Study, storage_of
from batchscape.search.trials import run_trials
from batchscape.search.words import search_text

__all__ = ["Searched", "search"]


class Searched(NamedTuple):
    """What a search came to."""

    sweep_dir: Path
    """Folder of the grid; the trials are in its `search/`."""
    result: SweepResult
    """Of the last launch."""
    is_whole: bool
    """Whether every trial was told."""


def search(
    grid: SweepCells, machine: Machine, prepare: Prepare, console: Console, command: str
) -> Searched:
    """Search, and then measure around the best; the same call goes on after any end.

    Parameters
    ----------
    grid : SweepCells
        Each cell with the low ends of its intervals.
    machine : Machine
        Where the runs execute.
    prepare : callable
        As `plan.build.make_plan` takes it.
    console : Console
        Where progress is shown.
    command : str
        Recorded with every run.

    Raises
    ------
    ConfigError
        If there is nothing to search, or the folder has trials of another search.
    LaunchError
        If the folder cannot be used, or another process searches in it.
    """
    space = space_of(grid)
    # Nothing is written before it is known that runs can be launched.
    prepared: dict[str, DataIdentity] = {}

    def prepare_once(data: Data) -> DataIdentity:
        if (key := repr(data)) not in prepared:
            prepared[key] = prepare(data)
        return prepared[key]

    _, corner = plan_at_corner(grid, machine, prepare_once)
    console.print(search_text(space), soft_wrap=True)
    sweep_dir = corner.sweep_dir
    sweep = SweepFolder(sweep_dir)
    with _alone(sweep.search):
        _check_space(space, sweep.search)
        storage = storage_of(sweep.search.path)
        studies = {of.name: Study(space, of.name, storage) for of in space.studies}
        of_trials, of_grid = (
            Launching(grid, corner, machine, prepare_once, console, command, space.keys, folder)
            for folder in (sweep.search, sweep)
        )
        result = run_trials(space, studies, of_trials)
        is_whole = all(study.trials and not study.untold for study in studies.values())
        if not result.interrupted and result.stopped is None:
            result = measure_around(space, studies, of_grid) or result
        return Searched(sweep_dir, result, is_whole=is_whole)


@contextmanager
def _alone(sweep: SweepFolder) -> Iterator[None]:
    """Keep other searches out of the folder: two of them would ask for twice the trials."""
    try:
        sweep.path.mkdir(parents=True, exist_ok=True)
        lock = take(sweep.search_lock)
    except OSError as error:
        msg = f"{sweep.path} cannot be used ({error}); give a sweep_dir that can be written to"
        raise LaunchError(msg) from None
    if lock is None:
        msg = f"another process searches in {sweep.path}; wait for it, or take another sweep_dir"
        raise LaunchError(msg)
    try:
        yield
    finally:
        lock.release()


def _check_space(space: Space, sweep: SweepFolder) -> None:
    """Refuse to mix the trials of two searches."""
    now = json.loads(json.dumps(space.identity))
    before = read_json(sweep.space).get("space", {}) if sweep.space.exists() else now
    other = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if other:
        told = "".join(
            f"\n  {key}: {before.get(key, 'nothing')} there, {now.get(key, 'nothing')} here"
            for key in other
        )
        msg = (
            f"{sweep.path} has the trials of another search, and trials of two searches are not "
            f"compared; use another sweep_dir:{told}"
        )
        raise ConfigError(msg)
    # What may change beside what may not: a status says how much of it is left.
    asked = {"trials": space.trials, "grid_points": space.sampler.grid_points}
    write_json(sweep.space, {"format_version": FORMAT_VERSION, "space": now, **asked})
