"""The search itself: trials of all studies side by side, then the grids around their best."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from optuna.trial import TrialState
from rich.console import Console

from batchscape.config import RunConfig
from batchscape.errors import ConfigError, LaunchError
from batchscape.launch.result import SweepResult
from batchscape.plan.build import Prepare
from batchscape.plan.expand import Cell, SweepCells
from batchscape.plan.identity import name_sweep
from batchscape.plan.machine import Machine
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import FORMAT_VERSION, SweepFolder
from batchscape.record.locks import take
from batchscape.record.spec import RunSpec
from batchscape.record.trials import write_trials
from batchscape.search.grid import measure_around
from batchscape.search.launching import Launching, key_of
from batchscape.search.objective import Outcome, outcome_of
from batchscape.search.pruning import MedianRule, curve_of
from batchscape.search.space import Space, StudyCells, space_of
from batchscape.search.study import Asked, Study, storage_of

__all__ = ["Searched", "search"]


class Searched(NamedTuple):
    """What a search came to."""

    sweep_dir: Path
    """Folder of the grid; the trials are in its `search/`."""
    result: SweepResult
    """Of the last launch."""


class _Trial(NamedTuple):
    """A trial of one of the studies, with its cells."""

    study: Study
    asked: Asked
    cells: list[Cell]


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
    config = RunConfig.from_mapping(grid.cells[0].settings)
    _, sweep_dir = name_sweep(
        config, sweep_file=grid.sweep_file, swept_keys=grid.axis_keys, fixed=grid.fixed
    )

    launching = Launching(grid, machine, prepare, console, command)
    sweep = SweepFolder(sweep_dir)
    with _alone(sweep.search):
        _check_space(space, sweep.search)
        storage = storage_of(space.sampler, sweep.search.path)
        # A database may have the studies of many folders, a journal lies in its own.
        place = "" if space.sampler.storage is None else f"{sweep_dir.resolve()}: "
        studies = {of.name: Study(space, of.name, storage, place) for of in space.studies}
        result = _run_trials(space, studies, sweep.search, launching)
        if not result.interrupted and result.stopped is None:
            best = {name: [trial.params for trial in of.best()] for name, of in studies.items()}
            result = measure_around(space, best, sweep, launching) or result
        return Searched(sweep_dir, result)


@contextmanager
def _alone(sweep: SweepFolder) -> Iterator[None]:
    """Keep other searches out of the folder: two of them would ask for twice the trials."""
    try:
        sweep.path.mkdir(parents=True, exist_ok=True)
        lock = take(sweep.path / ".search.lock")
    except OSError as error:
        msg = f"{sweep.path} cannot be used ({error}); give a sweep_dir that can be written to"
        raise LaunchError(msg) from None
    if lock is None:
        msg = f"another process searches in {sweep.path}; wait for its end, or use a sweep_dir"
        raise LaunchError(msg)
    try:
        yield
    finally:
        lock.release()


def _check_space(space: Space, sweep: SweepFolder) -> None:
    """Refuse to mix the trials of two searches."""
    asked = json.loads(json.dumps(space.as_json()))
    if not sweep.space.exists():
        write_json(sweep.space, {"format_version": FORMAT_VERSION, **asked})
        return
    known = read_json(sweep.space)
    before, now = _lines(known), _lines(asked)
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


def _lines(content: Mapping[str, Any]) -> dict[str, str]:
    """Flatten what was searched for a comparison."""
    nested = {k: content[k] for k in ("searched", "settings")}
    plain = {k: json.dumps(content[k]) for k in ("objective", "seeds", "max_memory_gib")}
    return plain | {k: json.dumps(v) for group in nested.values() for k, v in group.items()}


def _run_trials(
    space: Space, studies: Mapping[str, Study], sweep: SweepFolder, launching: Launching
) -> SweepResult:
    """Ask, run and tell until every study has its trials."""
    result = SweepResult((), interrupted=False)
    faults: set[tuple[str, int]] = set()
    wanted = sum(study.wanted for study in studies.values())
    while True:
        trials = [
            trial
            for of in space.studies
            for trial in _next_of(space, of, studies[of.name], len(studies))
            if (of.name, trial.asked.number) not in faults
        ]
        if not trials:
            return result
        cells = [cell for trial in trials for cell in trial.cells]
        cuts = None if space.sampler.pruner == "none" else partial(_rule, trials, sweep)
        specs, result = launching.run(cells, sweep, cuts)
        for trial in trials:
            own = [specs.get(key_of(cell)) for cell in trial.cells]
            runs = [spec for spec in own if spec is not None]
            outcome = outcome_of(
                runs if len(runs) == len(own) else [], sweep, space.sampler.objective
            )
            if _is_over(outcome):
                names = [spec.run_id for spec in runs]
                # A sampler learns from a trial that was cut, too: by its last loss.
                last = curve_of(sweep.run(names[0])) if outcome.state == "pruned" else {}
                trial.study.tell(trial.asked, outcome, names, last)
            elif not result.interrupted:
                name = next(name for name, study in studies.items() if study is trial.study)
                faults.add((name, trial.asked.number))
                launching.console.print(
                    f"Trial {trial.asked.number} of {name} {outcome.state}: {outcome.reason}; "
                    "the same command with --retry failed,timeout runs it again"
                )
        write_trials(sweep, _rows(space, studies))
        told = sum(len(study.trials) - len(study.untold()) for study in studies.values())
        launching.console.print(f"Trials: {told} of {wanted}")
        if result.interrupted or result.stopped is not None:
            return result


def _next_of(space: Space, of: StudyCells, study: Study, count: int) -> Iterator[_Trial]:
    """Yield the trials of a study that come next, those of a killed command first."""
    first, seeds = space.first_seed, space.sampler.seeds
    # As many at a time as keep the machine at work: a trial learns of those before it.
    config = RunConfig.from_mapping(of.cells[0].settings)
    at_a_time = math.ceil(config.launcher.concurrent_runs / (count * seeds))
    asked = study.untold()
    while len(asked) < at_a_time and len(study.trials) < study.wanted:
        asked.append(study.ask())
    for one in asked:
        cells = [c for seed in range(first, first + seeds) for c in of.at(one.point, seed)]
        yield _Trial(study, one, cells)


def _rule(
    trials: Sequence[_Trial], sweep: SweepFolder, specs: Mapping[str, RunSpec | None]
) -> MedianRule:
    """Return the rule that compares each run with the earlier trials of its study."""
    earlier = {
        spec.run_id: trial.study.told_runs()
        for trial in trials
        for cell in trial.cells
        if (spec := specs.get(key_of(cell))) is not None
    }
    return MedianRule(sweep, earlier)


def _is_over(outcome: Outcome) -> bool:
    return outcome.values is not None or outcome.state in {"pruned", "not measured"}


def _rows(space: Space, studies: Mapping[str, Study]) -> Iterator[dict[str, Any]]:
    for name, study in studies.items():
        best = {trial.number for trial in study.best()}
        for trial in study.trials:
            told = trial.state is TrialState.COMPLETE
            values = trial.values if told else [None] * len(space.sampler.objective)
            yield {
                "study": name,
                "trial": trial.number,
                **{key: trial.params.get(key) for key in space.keys},
                **dict(zip(space.sampler.objective, values, strict=True)),
                "outcome": trial.user_attrs.get("outcome", ""),
                "is_best": trial.number in best,
                "runs": " ".join(trial.user_attrs.get("runs", [])),
            }
