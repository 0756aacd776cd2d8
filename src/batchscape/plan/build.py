"""The plan of a sweep: which runs it has, which cells are rejected, and where they live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchscape.config import Command, Data, RunConfig
from batchscape.credentials import refuse_secrets
from batchscape.errors import ConfigError, GeometryError
from batchscape.geometry import BatchGeometry
from batchscape.models.source import model_source_hash
from batchscape.plan.expand import Cell, Grid
from batchscape.plan.identity import name_sweep
from batchscape.plan.machine import Machine
from batchscape.plan.resolve import (
    Rejection,
    check_multiples,
    placement_problem,
    reject,
    resolve,
)
from batchscape.plan.stages import solve_geometries
from batchscape.programs.script import command_source_hash
from batchscape.programs.settings import (
    check_commands,
    check_varied,
    too_wide,
    without_unpassed,
)
from batchscape.record.spec import DataIdentity, RunSpec

__all__ = ["Plan", "PlannedCell", "Prepare", "make_plan"]

Prepare = Callable[[Data], DataIdentity]
"""Reads the data of a configuration and names its content; `batchscape.data.prepare`."""

_MAX_PROBLEMS = 5


@dataclass(frozen=True)
class PlannedCell:
    """One cell of the plan."""

    outcome: RunSpec | Rejection
    swept: dict[str, Any]
    """The value of each axis, by key."""


@dataclass(frozen=True)
class Plan:
    """What a sweep launches, and what it does not."""

    sweep_name: str
    sweep_dir: Path
    cells: tuple[PlannedCell, ...]
    """In the order of the grid, each run once."""
    repeated: int
    """Cells left out because an earlier one is the same run."""

    @property
    def specs(self) -> list[RunSpec]:
        """The runs to launch."""
        return [c.outcome for c in self.cells if isinstance(c.outcome, RunSpec)]

    @property
    def rejections(self) -> list[Rejection]:
        """The cells that are never launched."""
        return [c.outcome for c in self.cells if isinstance(c.outcome, Rejection)]


def make_plan(grid: Grid, machine: Machine, prepare: Prepare) -> Plan:
    """Validate a grid, solve its geometries, and settle every run.

    Parameters
    ----------
    grid : Grid
    machine : Machine
        Where the runs would execute.
    prepare : callable
        Called once for each distinct data configuration.

    Returns
    -------
    Plan

    Raises
    ------
    ConfigError
        If a setting holds a secret or breaks a rule, settings of the whole sweep differ between
        cells, or no cell at all can be launched (a `GeometryError` where there is one cell only).
    """
    refuse_secrets(cell.settings for cell in grid.cells)
    configs = [without_unpassed(config) for config in _validate(grid.cells)]
    _check_common(configs)
    check_commands(configs, grid.axis_keys, grid.fixed)
    sweep_name, sweep_dir = name_sweep(
        configs[0], sweep_file=grid.sweep_file, swept_keys=grid.axis_keys, fixed=grid.fixed
    )
    solved = {(config.batch, config.sequence_length): config for config in configs}
    by_batch = {batch: _geometries(config) for batch, config in solved.items()}
    geometries = [by_batch[config.batch, config.sequence_length] for config in configs]
    problems = [
        str(stages)
        if isinstance(stages, GeometryError)
        else too_wide(stages[-1], config) or placement_problem(stages[-1], config, machine)
        for config, stages in zip(configs, geometries, strict=True)
    ]
    _refuse_empty(problems, geometries)
    _check_launched(configs, geometries, problems)
    check_varied(
        configs,
        [
            None if isinstance(stages, GeometryError) or problem else stages[-1]
            for stages, problem in zip(geometries, problems, strict=True)
        ],
    )

    prepared: dict[str, DataIdentity] = {}
    hashed: dict[str, str | None] = {}
    planned: dict[str, PlannedCell] = {}
    for cell, config, stages, problem in zip(
        grid.cells, configs, geometries, problems, strict=True
    ):
        outcome: RunSpec | Rejection
        if isinstance(stages, GeometryError):
            outcome = reject(config, str(stages))
        else:
            is_command = isinstance(config.engine, Command)
            data, model = repr(config.data), repr(config.engine if is_command else config.model)
            if data not in prepared:
                prepared[data] = prepare(config.data)
            if model not in hashed:
                hashed[model] = _source_hash(config)
            outcome = resolve(
                config,
                stages,
                prepared[data],
                source_hash=hashed[model],
                machine=machine,
                sweep_name=sweep_name,
            )
            if problem is not None:
                outcome = reject(config, problem, geometry=stages[-1], run_id=outcome.run_id)
        planned.setdefault(outcome.run_id, PlannedCell(outcome, cell.swept))
    return Plan(sweep_name, sweep_dir, tuple(planned.values()), len(configs) - len(planned))


def _validate(cells: Sequence[Cell]) -> list[RunConfig]:
    """Validate every cell; tell each distinct problem once."""
    configs: list[RunConfig] = []
    counts: Counter[str] = Counter()
    examples: dict[str, Cell] = {}
    for cell in cells:
        try:
            configs.append(RunConfig.from_mapping(cell.settings))
        except ConfigError as error:
            counts[str(error)] += 1
            examples.setdefault(str(error), cell)
    if not counts:
        return configs
    told = []
    for message, count in counts.most_common(_MAX_PROBLEMS):
        where = ""
        if count < len(cells):
            swept = ", ".join(f"{key}={value}" for key, value in examples[message].swept.items())
            where = f"\n  in {count} of {len(cells)} cells, such as {swept}"
        told.append(message + where)
    if len(counts) > _MAX_PROBLEMS:
        told.append(f"and {len(counts) - _MAX_PROBLEMS} further problems of that kind")
    raise ConfigError("\n".join(told))


def _check_common(configs: Sequence[RunConfig]) -> None:
    """A sweep has one name, one folder, one launcher and one tracker."""
    first = configs[0]
    for config in configs[1:]:
        for name in ("sweep_name", "sweep_dir", "launcher", "tracker"):
            ours, theirs = getattr(first, name), getattr(config, name)
            if name == "launcher":
                # Which device a run takes is part of the run, so it may differ.
                theirs = replace(theirs, device=ours.device)
            if ours != theirs:
                msg = f"{name} is one for the whole sweep and cannot be swept"
                raise ConfigError(msg)


def _source_hash(config: RunConfig) -> str | None:
    if isinstance(config.engine, Command):
        return command_source_hash(config.engine)
    return model_source_hash(config)


def _geometries(config: RunConfig) -> tuple[BatchGeometry, ...] | GeometryError:
    try:
        return solve_geometries(config)
    except GeometryError as error:
        return error


def _refuse_empty(
    problems: Sequence[str | None], geometries: Sequence[tuple[BatchGeometry, ...] | GeometryError]
) -> None:
    """A sweep that would launch nothing is a mistake, not an empty result."""
    if None in problems:
        return
    if len(problems) == 1:
        if isinstance(geometries[0], GeometryError):
            raise geometries[0]
        raise ConfigError(str(problems[0]))
    distinct = list(dict.fromkeys(str(problem) for problem in problems))
    shown = "".join(f"\n  {problem}" for problem in distinct[:_MAX_PROBLEMS])
    more = len(distinct) - _MAX_PROBLEMS
    msg = f"none of the {len(problems)} cells can be launched:{shown}"
    raise ConfigError(msg + (f"\n  and {more} further reasons" if more > 0 else ""))


def _check_launched(
    configs: Sequence[RunConfig],
    geometries: Sequence[tuple[BatchGeometry, ...] | GeometryError],
    problems: Sequence[str | None],
) -> None:
    """Check what depends on all global batches that are launched together."""
    launched = [
        (config, stages[-1].global_batch_size)
        for config, stages, problem in zip(configs, geometries, problems, strict=True)
        if problem is None and not isinstance(stages, GeometryError) and not config.batch.ramp
    ]
    global_batches = {size for _, size in launched}
    checked = set()
    for config, _ in launched:
        counted = (config.budget, config.evaluation, config.sequence_length)
        if counted not in checked:
            checked.add(counted)
            check_multiples(config, global_batches)
