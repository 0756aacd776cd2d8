"""The plan of a sweep: which runs it has, which cells are rejected, and where they live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchscape.config import Command, DataSettings, RunConfig
from batchscape.errors import ConfigError, GeometryError
from batchscape.geometry import BatchGeometry
from batchscape.models.source import model_source_hash
from batchscape.outgoing import refuse_secrets
from batchscape.plan.expand import Cell, SweepCells
from batchscape.plan.identity import name_sweep, rejected_id
from batchscape.plan.machine import Machine
from batchscape.plan.resolve import check_multiples, placement_problem, resolve
from batchscape.plan.stages import solve_geometries
from batchscape.programs.script import command_source_hash
from batchscape.programs.settings import (
    check_commands,
    check_varied,
    too_wide,
    without_unpassed,
)
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import DataIdentity, RunSpec
from batchscape.text import count_text

Prepare = Callable[[DataSettings], DataIdentity]
"""Reads the data of a configuration and names its content; `batchscape.data.prepare`."""

_MAX_PROBLEMS = 5


@dataclass(frozen=True)
class PlannedCell:
    """One cell of the plan: a run to launch, or the reason why there is none."""

    config: RunConfig
    value_of_axis: dict[str, Any]
    """The value of each axis, by key."""
    geometries: tuple[BatchGeometry, ...] = ()
    """One a stage; empty where there is none."""
    reason: str | None = None
    """Why it is never launched: the rule, the values, and what would work; None: it is."""
    run_id: str = ""
    """Of the run. A cell that merely lacks devices has the name of the run that it would be, so
    that a larger machine goes on in the same folder."""
    spec: RunSpec | None = None
    """What is launched; None where nothing is."""

    @property
    def geometry(self) -> BatchGeometry | None:
        """The last geometry, which names a run; None where there is none."""
        return self.geometries[-1] if self.geometries else None


@dataclass(frozen=True)
class Plan:
    """What a sweep launches, and what it does not."""

    sweep_name: str
    sweep_dir: Path
    cells: tuple[PlannedCell, ...]
    """In the order of the grid, each run once."""
    repeated: int
    """Cells left out because an earlier one is the same run."""
    run_ids: tuple[str, ...]
    """The run of each cell that was asked for, those left out among them."""

    @property
    def specs(self) -> list[RunSpec]:
        """The runs to launch."""
        return [cell.spec for cell in self.cells if cell.spec is not None]

    @property
    def rejections(self) -> list[PlannedCell]:
        """The cells that are never launched."""
        return [cell for cell in self.cells if cell.spec is None]


def make_plan(
    grid: SweepCells, machine: Machine, prepare: Prepare, *, may_be_empty: bool = False
) -> Plan:
    """Validate a grid, solve its geometries, and settle every run."""
    if grid.intervals:
        keys = ", ".join(interval.key for interval in grid.intervals)
        raise ConfigError(
            f"{keys}: an interval holds infinitely many values, and a sweep needs a list; write "
            "key=value1,value2 or key=range(start,stop,step), or search it: "
            "`batchscape sweep ... search=gp`"
        )
    refuse_secrets(cell.settings for cell in grid.cells)
    cells = _validate(grid.cells)
    configs = [cell.config for cell in cells]
    _check_common(configs)
    check_commands(configs, grid.axis_keys, grid.fixed)
    sweep_name, sweep_dir = name_sweep(
        configs[0], sweep_file=grid.sweep_file, swept_keys=grid.axis_keys, fixed=grid.fixed
    )
    cells = _solve_cells(cells, machine)
    launched = [cell for cell in cells if cell.reason is None]
    if not launched and not may_be_empty:
        raise ConfigError(_nothing_to_launch(cells))
    _check_multiples(launched)
    check_varied((cell.config, cell.geometries[-1]) for cell in launched)

    prepared: dict[str, DataIdentity] = {}
    hashed: dict[str, str | None] = {}
    planned: dict[str, PlannedCell] = {}
    run_ids = []
    for cell in cells:
        config = cell.config
        if not cell.geometries:
            settled = replace(cell, run_id=rejected_id(config))
        else:
            command = config.engine if isinstance(config.engine, Command) else None
            data, source = repr(config.data), repr(command or config.model)
            if data not in prepared:
                prepared[data] = prepare(config.data)
            if source not in hashed:
                hashed[source] = (
                    command_source_hash(command) if command else model_source_hash(config)
                )
            spec = resolve(
                config,
                cell.geometries,
                prepared[data],
                source_hash=hashed[source],
                machine=machine,
                sweep_name=sweep_name,
            )
            settled = replace(cell, run_id=spec.run_id, spec=spec if cell.reason is None else None)
        planned.setdefault(settled.run_id, settled)
        run_ids.append(settled.run_id)
    repeated = len(cells) - len(planned)
    planned |= _cuts_to_time(planned.values(), SweepFolder(sweep_dir))
    run_ids = [planned[run_id].run_id for run_id in run_ids]
    return Plan(sweep_name, sweep_dir, tuple(planned.values()), repeated, tuple(run_ids))


def _cuts_to_time(cells: Iterable[PlannedCell], sweep: SweepFolder) -> dict[str, PlannedCell]:
    """Return the cells that are only timed, as another one trains the whole budget, by run."""
    cells_by_trajectory: dict[str, list[PlannedCell]] = {}
    for cell in cells:
        if cell.spec is not None:
            cells_by_trajectory.setdefault(cell.spec.trajectory_id, []).append(cell)
    to_time = {}
    for cuts in cells_by_trajectory.values():
        # Where the least runs out of memory, so do the others; what was begun whole stays so.
        begun = [cell for cell in cuts if sweep.run(cell.run_id).launch.exists()]
        least = begun or [min(cuts, key=_demand)]
        for cell in cuts:
            spec, steps = cell.spec, cell.config.measure.steps_of_further_cuts
            if spec is None or cell in least or steps is None or cell.config.batch.ramp:
                continue
            if steps < spec.optimizer_steps:
                run_id = f"{spec.run_id}-t{steps}"
                spec = replace(spec, run_id=run_id, timed_steps=steps)
                to_time[cell.run_id] = replace(cell, run_id=run_id, spec=spec)
    return to_time


def _demand(cell: PlannedCell) -> tuple[int, int]:
    """Return what the cuts of one training take of memory, in order; equal ones by their time."""
    geometry = cell.geometries[-1]
    return geometry.micro_batch_size, -geometry.data_parallel_size


def _validate(cells: Sequence[Cell]) -> list[PlannedCell]:
    """Validate every cell; raise with each distinct problem once."""
    valid: list[PlannedCell] = []
    problems: dict[str, list[Cell]] = {}
    for cell in cells:
        try:
            config = without_unpassed(RunConfig.from_mapping(cell.settings))
            valid.append(PlannedCell(config, cell.value_of_axis))
        except ConfigError as error:
            problems.setdefault(str(error), []).append(cell)
    if not problems:
        return valid
    texts = []
    for message, (first, *others) in problems.items():
        example = ", ".join(f"{key}={value}" for key, value in first.value_of_axis.items())
        where = f"\n  in {1 + len(others)} of {len(cells)} cells, such as {example}"
        texts.append(message + (where if 1 + len(others) < len(cells) else ""))
    raise ConfigError("\n".join(_first_of(texts)))


def _check_common(configs: Sequence[RunConfig]) -> None:
    """Refuse cells that differ in a setting of the whole sweep."""
    first = configs[0]
    for config in configs[1:]:
        for name in ("sweep_name", "sweep_dir", "launcher", "tracker", "cluster", "search"):
            if getattr(first, name) != getattr(config, name):
                msg = f"{name} is one for the whole sweep and cannot be swept"
                if name == "launcher":
                    msg += "; launch once for each launcher.device, the runs share the folder"
                raise ConfigError(msg)


def _solve_cells(cells: Sequence[PlannedCell], machine: Machine) -> list[PlannedCell]:
    """Return cells with their geometries, or with the reason why they have none that can run."""
    solved: dict[object, tuple[BatchGeometry, ...] | str] = {}
    solved_cells = []
    for cell in cells:
        config = cell.config
        batch = config.batch, config.sequence_length
        if batch not in solved:
            try:
                solved[batch] = solve_geometries(config)
            except GeometryError as error:
                solved[batch] = str(error)
        geometries = solved[batch]
        if isinstance(geometries, str):
            solved_cells.append(replace(cell, reason=geometries))
        else:
            reason = too_wide(geometries[-1], config) or placement_problem(
                geometries[-1], config, machine
            )
            solved_cells.append(replace(cell, geometries=geometries, reason=reason))
    return solved_cells


def _nothing_to_launch(cells: Sequence[PlannedCell]) -> str:
    """Return the message about a sweep that would launch nothing."""
    distinct = list(dict.fromkeys(str(cell.reason) for cell in cells))
    if len(cells) == 1:
        return distinct[0]
    return "\n  ".join([f"none of the {len(cells)} cells can be launched:", *_first_of(distinct)])


def _first_of(problems: Sequence[str]) -> list[str]:
    """Return problems; of many the first ones and how many more there are."""
    more = len(problems) - _MAX_PROBLEMS
    ends = [f"and {count_text(more, 'further problem')}"] if more > 0 else []
    return [*problems[:_MAX_PROBLEMS], *ends]


def _check_multiples(launched: Sequence[PlannedCell]) -> None:
    """Check what depends on all global batches that are launched together."""
    counted = [cell for cell in launched if not cell.config.batch.ramp]
    global_batches = {cell.geometries[-1].global_batch_size for cell in counted}
    checked = set()
    for config in (cell.config for cell in counted):
        sizes = (config.budget, config.evaluation, config.sequence_length)
        if sizes not in checked:
            checked.add(sizes)
            check_multiples(config, global_batches)
