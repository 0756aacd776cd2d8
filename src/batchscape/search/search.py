"""The search: trials of all studies side by side, then the grids around their best."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from batchscape.config import DataSettings
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


class SearchResult(NamedTuple):
    """Result of a search."""

    sweep_dir: Path
    """Folder of the grid; the trials are in its `search/`."""
    result: SweepResult
    """Result of the last launch."""
    is_complete: bool
    """Whether every trial is over."""


def search(
    grid: SweepCells, machine: Machine, prepare: Prepare, console: Console, command: str
) -> SearchResult:
    """Search, and then measure around the best; the same call goes on after an interruption.

    Parameters
    ----------
    grid : SweepCells
        Each cell with the low ends of its intervals.
    machine : Machine
        Machine of the runs.
    prepare : callable
        As `plan.build.make_plan` takes it.
    console : Console
        Where progress is shown.
    command : str
        Command that is recorded with every run.

    Raises
    ------
    ConfigError
        If there is nothing to search, or the folder has trials of another search.
    LaunchError
        If the folder cannot be used, or another process searches in it.
    """
    space = space_of(grid)
    # No file is written before some run can be launched.
    prepared: dict[str, DataIdentity] = {}

    def prepare_once(data: DataSettings) -> DataIdentity:
        if (key := repr(data)) not in prepared:
            prepared[key] = prepare(data)
        return prepared[key]

    _, corner = plan_at_corner(grid, machine, prepare_once)
    console.print(search_text(space), soft_wrap=True)
    sweep_dir = corner.sweep_dir
    sweep = SweepFolder(sweep_dir)
    with _exclusive(sweep.search):
        _check_space(space, sweep.search)
        storage = storage_of(sweep.search.path)
        studies = {cells.name: Study(space, cells.name, storage) for cells in space.studies}
        trials, around_best = (
            Launching(grid, corner, machine, prepare_once, console, command, space.keys, folder)
            for folder in (sweep.search, sweep)
        )
        result = run_trials(space, studies, trials)
        is_complete = all(study.trials and not study.running for study in studies.values())
        if not result.interrupted and result.why_stopped is None:
            result = measure_around(space, studies, around_best) or result
        return SearchResult(sweep_dir, result, is_complete=is_complete)


@contextmanager
def _exclusive(sweep: SweepFolder) -> Iterator[None]:
    """Exclude other searches from the folder: two would ask for twice the trials."""
    try:
        sweep.path.mkdir(parents=True, exist_ok=True)
        lock = take(sweep.search_lock)
    except OSError as error:
        raise LaunchError(
            f"{sweep.path} cannot be used ({error}); give a sweep_dir that can be written to"
        ) from None
    if lock is None:
        raise LaunchError(
            f"another process searches in {sweep.path}; wait for it, or take another sweep_dir"
        )
    try:
        yield
    finally:
        lock.release()


def _check_space(space: Space, sweep: SweepFolder) -> None:
    """Write the space of a search; refuse a folder with the trials of another."""
    now = json.loads(json.dumps(space.identity))
    before = read_json(sweep.space).get("space", {}) if sweep.space.exists() else now
    other = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if other:
        listing = "".join(
            f"\n  {key}: {before.get(key, 'nothing')} there, {now.get(key, 'nothing')} here"
            for key in other
        )
        raise ConfigError(
            f"{sweep.path} has the trials of another search, and trials of two searches are not "
            f"compared; use another sweep_dir:{listing}"
        )
    # These may change; `status` reads them.
    counts = {"trials": space.trials, "grid_points": space.sampler.grid_points}
    write_json(sweep.space, {"format_version": FORMAT_VERSION, "space": now, **counts})
