"""One run folder as one W&B run: the mirrored values and their names.

==============  =====================================================================
W&B             run folder
==============  =====================================================================
name            geometry, engine, model, optimizer, learning rate, a hash of the cell, seed:
                `2x8x4 fsdp gpt adamw 0.001 1f3a2b s3`
group           the cell: the same for all seeds, so that W&B draws their mean and range
config          geometry, identity and resolved settings as columns; all settings that the
                program got, nested; how it was launched (`launch.devices`, ...)
history         one row an optimizer step, one an evaluation; every row carries all axes
axes            `samples` for losses, `optimizer_step` for times; `tokens` and
                `train_time_s` to choose from
summary         the summary of `status.json`, with status, stop reason and reason; times only where
                they count, and `timing_valid` and `timing_invalid_reason` beside them
==============  =====================================================================

Names of curves and figures are in `record.figures`; the part before the slash is a section of
panels. Rows leave missing values out; as in the tables, a loss that is not a number is missing.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import wandb

from batchscape.config import WandbTracker
from batchscape.outgoing import outgoing, outgoing_json
from batchscape.record.figures import COLUMNS, FIGURES, RESIDENT
from batchscape.record.files import Tail, read_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import read_table
from batchscape.record.timing import VERDICT, timed_figures, why_run_untimed
from batchscape.tracking.labels import Label, passed_settings
from batchscape.tracking.mirror import patience_s
from batchscape.tracking.state import MirrorState, digest_of_end, id_of

HistoryRow = Mapping[str, Any]

AXES = ("optimizer_step", "samples", "tokens", "train_time_s")
"""Columns that every row of the history carries under their own names."""

CURVES: dict[str, dict[str, str]] = {
    table: {name: column.curve for name, column in COLUMNS[table].items() if column.curve}
    for table in ("steps", "evals")
}
"""Name in W&B of each mirrored column, by table."""

_THROUGHPUT = "throughput/samples_per_s"
_BY_OPTIMIZER_STEP = frozenset({"time", "throughput", "system"})


def section_axes() -> dict[str, str]:
    """Return the horizontal axis of each section: `samples`, or `optimizer_step` for costs."""
    names = [_THROUGHPUT, *(name for names in CURVES.values() for name in names.values())]
    sections = {name.partition("/")[0] for name in names}
    return {s: "optimizer_step" if s in _BY_OPTIMIZER_STEP else "samples" for s in sections}


def curve_points(table: str, row: HistoryRow) -> dict[str, Any]:
    """Return the values of one row for W&B: the axes, and a point of each curve.

    W&B draws numbers only, so that a truth value becomes 0 or 1.

    Parameters
    ----------
    table : str
        `steps` or `evals`.
    row : mapping
        Values by column.
    """
    names = dict(zip(AXES, AXES, strict=True)) | CURVES[table]
    present = {column: row[column] for column in names if not pd.isna(row.get(column))}
    points = {names[c]: int(v) if isinstance(v, bool) else v for c, v in present.items()}
    if table == "steps" and present.get("step_time_s") and "global_batch_size" in present:
        points[_THROUGHPUT] = present["global_batch_size"] / present["step_time_s"]
    return points


ROWS_PER_EVENT = 256
_POLL_S = 0.2
_UNTIMED = "timing_invalid"
"""Tag of a run whose times do not count."""
_NumberedRow = tuple[int, str, HistoryRow]
"""A row with its number in W&B, 2k for optimizer step k and 2k + 1 for the evaluation then."""


class WandbRun:
    """A run folder and the W&B run that it is written to, from init to finish.

    Parameters
    ----------
    folder : RunFolder
    sweep_dir : Path
    tracker : WandbTracker
        Its mode is not used.
    mode : str
        `online` or `offline`.
    status : RunStatus
        Current status of the run.
    label : Label
        Name and group of the run.
    sweep_id : str
        Id of its sweep in W&B.
    tell_rows : callable
        Called from time to time while W&B takes rows, so that a long run is not taken for silence.
    """

    def __init__(
        self,
        folder: RunFolder,
        sweep_dir: Path,
        tracker: WandbTracker,
        *,
        mode: Literal["online", "offline"],
        status: RunStatus,
        label: Label,
        sweep_id: str,
        tell_rows: Callable[[], None],
    ) -> None:
        self._folder = folder
        self._tell_rows = tell_rows
        self._tracker = tracker
        self._tails = {table: Tail(folder.lines(table)) for table in CURVES}
        self._held_rows: list[_NumberedRow] = []
        state = MirrorState.read(folder)
        self._state = state or MirrorState(project=tracker.project, entity=tracker.entity)
        wandb_id = id_of(folder.path.name, status)
        self._offline_copies = [
            path
            for path in SweepFolder(sweep_dir).wandb.glob("offline-run-*")
            if path.name.endswith(f"-{wandb_id}") and not path.is_symlink()
        ]
        """Earlier offline copies of the run, which the new one replaces."""
        self._run = wandb.init(
            id=wandb_id,
            name=outgoing(label.name),
            group=outgoing(label.group),
            job_type="train",
            project=self._state.project,
            entity=self._state.entity,
            tags=self._tags(status),
            config=_config(folder) | {"sweep_id": sweep_id},
            dir=str(sweep_dir),
            mode=mode,
            resume="allow",
            reinit="create_new",
            allow_val_change=True,
            settings=quiet_settings(),
        )
        self._state.mode, self._state.content = mode, None
        self._state.write(folder)
        # Last step at the server; offline, all rows are written anew.
        self._last_step = self._run.starting_step - 1
        for axis in AXES:
            # The summary holds values of the run folder, not of the last row.
            self._run.define_metric(axis, hidden=True, summary="none")
        for section, axis in section_axes().items():
            # Nor does it hold the last point of a curve.
            self._run.define_metric(
                f"{section}/*", step_metric=axis, step_sync=False, summary="none"
            )

    def follow(self) -> None:
        """Mirror the rows that were written since the last call, while the run runs."""
        # `steps` is read before `evals`: an evaluation is written before any later optimizer step.
        for table in CURVES:
            self._held_rows += _with_numbers(table, self._tails[table].read())
        last_optimizer_step = max(
            (step for step, table, _ in self._held_rows if table == "steps"), default=0
        )
        # An evaluation has the number after that of its step.
        last_ready = max(last_optimizer_step, self._last_step) + 1
        self._log(row for row in self._held_rows if row[0] <= last_ready)
        self._held_rows = [row for row in self._held_rows if row[0] > last_ready]

    def close(self, status: RunStatus) -> None:
        """Mirror the remaining rows of a run that has ended, and its end.

        Raises
        ------
        TimeoutError
            If the server does not show the end of the run.
        """
        folder = self._folder
        untimed = why_run_untimed(folder, status)
        self._log(
            row
            for table in CURVES
            for row in _with_numbers(table, read_table(folder, table).to_dict("records"))
        )
        figures = timed_figures(status.summary, untimed)
        if read_table(folder, "ranks")["memory_method"].eq(RESIDENT).any():
            # The peak is of resident memory: only the program knows what it allocated.
            figures["peak_allocated_gib"] = None
        self._run.summary.update(
            {
                # Every figure, to replace those of an earlier attempt.
                **{name: figures.get(name) for name in FIGURES},
                **dict(zip(VERDICT, (untimed is None, untimed), strict=True)),
                "status": str(status.status),
                "stop_reason": None if status.stop_reason is None else str(status.stop_reason),
                "reason": None if status.reason is None else outgoing(status.reason),
                "attempts": len(status.attempts),
            }
        )
        self._run.tags = self._tags(status)
        ended_well = status.status in {Status.COMPLETED, Status.PRUNED}
        finish(self._run, "finished" if ended_well else "failed")
        for path in self._offline_copies:
            shutil.rmtree(path, ignore_errors=True)
        self._state.content = digest_of_end(status)
        self._state.write(folder)

    def _log(self, rows: Iterable[_NumberedRow]) -> None:
        """Log rows that W&B lacks: a resumed run repeats the rows after its checkpoint."""
        for number, (step, table, row) in enumerate(sorted(rows, key=lambda keyed: keyed[0])):
            if step > self._last_step:
                self._run.log(curve_points(table, row), step=step)
                self._last_step = step
                if number % ROWS_PER_EVENT == 0:
                    self._tell_rows()

    def _tags(self, status: RunStatus) -> tuple[str, ...]:
        untimed = [_UNTIMED] if why_run_untimed(self._folder, status) is not None else []
        tags = [*map(outgoing, self._tracker.tags), str(status.status), *untimed]
        return tuple(dict.fromkeys(tags))


def quiet_settings() -> wandb.Settings:
    """Return settings by which W&B collects no console, code, git state or machine."""
    return wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        save_code=False,
        init_timeout=patience_s(),
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )


def finish(run: wandb.Run, state: Literal["finished", "failed"]) -> None:
    """Finish a W&B run, and wait until the server shows its end.

    The finish of W&B returns without an error when an upload was refused.

    Raises
    ------
    TimeoutError
        If the server does not show it.
    """
    path, is_offline = run.path, run.offline
    run.finish(exit_code=0 if state == "finished" else 1)
    deadline = time.monotonic() + patience_s()
    while not is_offline:
        with suppress(Exception):  # W&B raises errors of many families
            # A new client each time, as it caches its answers.
            if wandb.Api(timeout=math.ceil(patience_s())).run(path).state == state:
                return
        if time.monotonic() >= deadline:
            raise TimeoutError(f"the server does not show the end of {path}")
        time.sleep(_POLL_S)


def _config(folder: RunFolder) -> dict[str, Any]:
    """Return the config of a run in W&B.

    Groups of settings stay nested: W&B shows `model.name`, and a dot in a key breaks its queries.
    """
    content = read_json(folder.config)
    config: dict[str, Any] = passed_settings(content)
    unpassed_keys = set(content["resolved"].get("not_passed", ()))
    for name, value in content["resolved"].items():
        if name in unpassed_keys or name == "not_passed":
            continue
        # A planned value must not be taken for a measured one.
        config[f"planned_{name}" if name in FIGURES else name] = value
    config["stages"] = [
        {
            **stage,
            "optimizer": {
                name: value
                for name, value in stage["optimizer"].items()
                if f"optimizer.{name}" not in unpassed_keys
            },
        }
        for stage in config["stages"]
    ]
    config |= content["geometry"]
    config |= {name: content[name] for name in ("run_id", "trajectory_id", "sweep_name")}
    config["data_manifest_hash"] = content["data"]["manifest_hash"]
    if folder.launch.exists():
        launch = read_json(folder.launch)
        # A path that is gone when the run ends, and entries of the summary.
        for name in ("rendezvous", *VERDICT):
            launch.pop(name, None)
        config["launch"] = launch
    redacted: dict[str, Any] = outgoing_json(config)
    return redacted


def _with_numbers(table: str, rows: Iterable[Mapping[Any, Any]]) -> list[_NumberedRow]:
    return [(2 * row["optimizer_step"] + (table == "evals"), table, row) for row in rows]
