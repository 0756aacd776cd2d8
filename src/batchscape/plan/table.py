"""A plan as a table, as JSON, and as `plan.csv` in the sweep folder."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from batchscape.config import Affects, Command, affects_of
from batchscape.errors import RecordError
from batchscape.launch.beginnings import find_beginnings
from batchscape.launch.schedule import launch_order
from batchscape.outgoing import outgoing_cell, outgoing_json
from batchscape.plan.build import Plan, PlannedCell
from batchscape.plan.disk_use import disk_warning
from batchscape.plan.forecast import RunForecast, SweepForecast
from batchscape.plan.forecast_text import add_rows, forecast_text
from batchscape.plan.machine import Machine
from batchscape.plan.room import why_not_launched
from batchscape.programs.settings import unlogged
from batchscape.record.disk import check_usable
from batchscape.record.files import write_atomically, write_json
from batchscape.record.folder import FORMAT_VERSION, RunFolder, SweepFolder
from batchscape.record.locks import hold
from batchscape.record.overview import run_progress
from batchscape.record.placeholders import unpassed_settings
from batchscape.record.spec import RunSpec, plain_geometry
from batchscape.record.state import unsealed
from batchscape.record.status import RunStatus, Status
from batchscape.text import count_text

_GEOMETRY = (
    "data_parallel_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
)
_GEOMETRY_TITLE = "devices x micro\nx accumulation\n= global"
_ARROW = " -> "
_FIRST, _LAST = 100, 5
"""Rows that a person is shown of a long table, from its start and from its end."""

PLAN_COLUMNS = (
    "run_id",
    "planned",
    "nodes",
    *_GEOMETRY,
    "optimizer_steps",
    "samples",
    "ramp",
    "device_type",
    "precision",
    "seed",
    "trajectory_id",
    "reason",
)
"""Columns of `plan.csv`, before those of the swept settings. Where the global batch changes on the
way, the geometry is the last one, and `ramp` has all global batches (`8 -> 32`)."""


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return one row a cell, with `PLAN_COLUMNS` and the swept settings.

    `planned` is `launch` or `rejected`; how far a launched run is stands in its own folder.
    """
    return [_row(cell) for cell in plan.cells]


def plan_table(plan: Plan, predicted: SweepForecast, *, lists_runs: bool = True) -> RenderableType:
    """Return runs, rejections, forecast and counts of a plan for a terminal."""
    parts = _runs_table(plan) if lists_runs else []
    if rejected := [_row(cell) for cell in plan.rejections]:
        parts.append(_rejected_table(rejected))
    commands = [s.config.engine for s in plan.specs if isinstance(s.config.engine, Command)]
    # Most runs of a plan lack the same.
    for what in dict.fromkeys(what for command in commands for what in unlogged(command)):
        parts.append(Text(f"By engine.argv and engine.metrics the program will not tell {what}."))
    cuts = {c.run_id: _costly(c.spec, c.value_of_axis) for c in plan.cells if c.spec is not None}
    parts += forecast_text(predicted, cuts)
    parts.append(Text(plan_summary(plan)))
    return Group(*parts)


def _runs_table(plan: Plan) -> list[RenderableType]:
    """Return a table with a line a run."""
    sweep, own_columns = SweepFolder(plan.sweep_dir), {*_GEOMETRY, "ramp", "seed"}
    extra = [
        key for key in plan.cells[0].value_of_axis if key.removeprefix("batch.") not in own_columns
    ]
    columns = (*extra, "seed", "optimizer_steps", "samples")
    titles = (*(key.replace(".", ".\n") for key in extra), "seed", "optimizer\nsteps", "samples")
    runs = _table(Column("run_id", no_wrap=True), _GEOMETRY_TITLE, *titles, "status")

    def line(cell: PlannedCell) -> list[str]:
        row = _row(cell)
        values = (_show(row[column]) for column in columns)
        cut = "" if cell.spec is None else _cuts(cell.spec)
        return [cell.run_id, cut, *values, _status(sweep.run(cell.run_id))]

    cells = [cell for cell in plan.cells if cell.spec is not None]
    if not (left_out := add_rows(runs, cells, line, _FIRST, _LAST)):
        return [runs]
    text = f"Not shown: {count_text(left_out, 'more run')}. A sweep writes all of them to"
    return [runs, Text(f"{text} {sweep.plan}.")]


def plan_json(plan: Plan, machine: Machine, predicted: SweepForecast) -> str:
    """Return the whole plan as JSON.

    `runs` has one object a cell: its row of `plan_rows`, its `status` in the sweep folder, and the
    fields of a `RunForecast`, null where nothing is launched; what cannot fit is `rejected`. A
    figure has `low`, `high` and `value`. `sweep` has the totals of the runs that are left.
    """
    sweep, nothing = SweepFolder(plan.sweep_dir), dict.fromkeys(f.name for f in fields(RunForecast))
    runs = []
    for cell in plan.cells:
        row = _row(cell) | nothing
        if cell.spec is not None:
            forecast = predicted.runs[cell.run_id]
            row |= asdict(forecast)
            if reason := why_not_launched(cell.spec, forecast.memory):
                row |= {"planned": "rejected", "reason": reason}
        row["status"] = _status(sweep.run(cell.run_id))
        if row["planned"] == "rejected" and row["status"] == Status.PENDING:
            row["status"] = str(Status.REJECTED)
        runs.append(row)
    device_type = machine.device_type(plan.cells[0].config.launcher)
    content = {
        "sweep_name": plan.sweep_name,
        "sweep_dir": str(plan.sweep_dir),
        "repeated": plan.repeated,
        "machine": {
            "is_declared": machine.is_declared,
            "device_type": device_type,
            "devices": machine.devices(device_type),
            "nodes": machine.nodes,
        },
        "runs": runs,
        "sweep": {name: value for name, value in asdict(predicted).items() if name != "runs"},
    }
    return json.dumps(outgoing_json(content), indent=2, allow_nan=False)


def write_plan(plan: Plan) -> None:
    """Write `plan.csv`, and a run folder for each rejected cell."""
    sweep = SweepFolder(plan.sweep_dir)
    check_usable(sweep)
    rows = plan_rows(plan)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: outgoing_cell(v) if isinstance(v, str) else v for k, v in row.items()})
    # Another launcher may be about to begin a run that this plan rejects.
    with hold(sweep.writing_lock):
        for rejection in plan.rejections:
            _write_rejection(sweep.run(rejection.run_id), plan.sweep_name, rejection)
        write_atomically(sweep.plan, text.getvalue().encode())


def _row(cell: PlannedCell) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(PLAN_COLUMNS)
    batch, spec = cell.config.batch, cell.spec
    row |= {name: getattr(cell.geometry or batch, name) for name in ("nodes", *_GEOMETRY)}
    row |= {"run_id": cell.run_id, "seed": cell.config.seed}
    if spec is not None:
        row |= {
            "planned": "launch",
            "optimizer_steps": spec.optimizer_steps,
            "samples": spec.samples,
            "ramp": _ramp(spec, "global_batch_size") if len(spec.stages) > 1 else None,
            "device_type": spec.device_type,
            "precision": spec.precision,
            "trajectory_id": spec.trajectory_id,
        }
    else:
        row |= {"planned": "rejected", "reason": cell.reason}
    return row | {key: value for key, value in cell.value_of_axis.items() if key not in row}


def _status(folder: RunFolder) -> str:
    """Return the status of a planned run: that on the disk, unless it is to start anew."""
    progress = run_progress(folder)
    return str(Status.PENDING) if progress.is_rejected_by_plan else progress.status


def _rejected_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table with a line a reason, however many seeds share it."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        # What nobody asked for, and nothing determines, is `?`.
        *factors, product = (_show(row[name]) or "?" for name in _GEOMETRY)
        counts[f"{' x '.join(factors)} = {product}", row["reason"]] += 1
    table = _table("rejected\ncells", _GEOMETRY_TITLE, "reason")
    lines = [[str(count), *line] for line, count in counts.items()]
    add_rows(table, lines, list, _FIRST, _LAST)
    return table


def _table(*columns: Column | str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def _cuts(spec: RunSpec) -> str:
    """Write the geometry of a run; factors that a ramp changes are shown in their order."""
    ranks, *factors, global_batch = (_ramp(spec, name) for name in _GEOMETRY)
    cut = [f"({factor})" if _ARROW in factor else factor for factor in factors]
    return f"{' x '.join([ranks, *cut])} = {global_batch}"


def _costly(spec: RunSpec, swept: Mapping[str, Any]) -> str:
    """Return the geometry of a run with the other swept settings that affect its cost or length."""
    others = [
        f"{key.rpartition('.')[2]}={_show(value)}"
        for key, value in swept.items()
        if key.startswith("budget.")
        or (not key.startswith("batch.") and (affects_of(key) or Affects.NOTHING) & Affects.COST)
    ]
    nodes = spec.geometry.nodes
    places = [f"on {nodes} nodes"] if nodes > 1 else []
    return "\n".join((_cuts(spec).partition(" = ")[0], *places, *others))


def _ramp(spec: RunSpec, name: str) -> str:
    values = [str(getattr(stage.geometry, name)) for stage in spec.stages]
    return values[0] if len(set(values)) == 1 else _ARROW.join(values)


def plan_summary(plan: Plan) -> str:
    """Return the counts of a plan and its folder in one line; a warning where its disk is small."""
    text = f"Runs: {len(plan.specs)}. Rejected runs: {len(plan.rejections)}."
    if plan.repeated:
        text += f" Cells left out because they repeat a run: {plan.repeated}."
    sweep = SweepFolder(plan.sweep_dir)
    open_specs = unsealed(plan.specs, sweep)
    if beginnings := find_beginnings(launch_order(open_specs), sweep):
        spared = sum(beginning.optimizer_steps for beginning in beginnings.values())
        share = spared / sum(spec.optimizer_steps for spec in open_specs)
        text += (
            f" Runs that begin as another one, and go on from its state: {len(beginnings)}; that "
            f"spares {share:.0%} of the optimizer steps to train."
        )
    warning = disk_warning(plan.specs, sweep)
    return f"{text} Folder: {plan.sweep_dir}" + (f"\nWarning. {warning}" if warning else "")


def _show(value: Any) -> str:  # noqa: ANN401  (any value of a plan)
    return "" if value is None else str(value)


def _write_rejection(folder: RunFolder, sweep_name: str, rejection: PlannedCell) -> None:
    config = rejection.config
    # A run that a larger machine did is a result, whatever this one can hold.
    if folder.launch.exists():
        return
    if folder.status.exists():
        try:
            status = RunStatus.read(folder.status)
        except RecordError:
            status = RunStatus(Status.REJECTED)  # written again: it is derived
        if status.status is not Status.REJECTED or status.reason == rejection.reason:
            return
    write_json(
        folder.config,
        {
            "format_version": FORMAT_VERSION,
            "run_id": rejection.run_id,
            "trajectory_id": None,
            "sweep_name": sweep_name,
            "geometry": rejection.geometry and plain_geometry(rejection.geometry),
            # A setting that is never passed to a program is no setting of its cells.
            "resolved": {"not_passed": unpassed_settings(config)}
            if isinstance(config.engine, Command)
            else None,
            "data": None,
            "config": config.to_mapping(),
        },
    )
    RunStatus(Status.REJECTED, reason=rejection.reason).write(folder.status)
