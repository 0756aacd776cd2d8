"""One run folder as one W&B run: what of it is mirrored, under which names.

==============  =====================================================================
W&B             run folder
==============  =====================================================================
name, group     `run_id`, `sweep_name`
config          geometry, identity and resolved settings as columns; all settings,
                nested; how the processes were launched (`launch.timing_valid`, ...)
history         one row an optimizer step, one an evaluation; every row carries all axes
axes            `samples` for losses, `optimizer_step` for times; `tokens` and
                `train_time_s` to choose from
summary         the summary of `status.json`, with status, stop reason and reason
tags            those of the tracker, and the status
state           finished for a completed or pruned run, else failed
==============  =====================================================================

Missing values are left out of rows; as in the tables, a loss that is not a number is missing.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import wandb

from batchscape.config import WandbTracker
from batchscape.errors import RecordError
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder
from batchscape.record.mirror import MirrorState, wandb_folder
from batchscape.record.status import RunStatus, Status
from batchscape.record.summary import SUMMARY
from batchscape.record.tables import read_table, verify_seal

__all__ = ["AXES", "METRICS", "NOT_MIRRORED", "WandbRun", "run_config"]

Row = Mapping[str, Any]

AXES = ("optimizer_step", "samples", "tokens", "train_time_s")
"""Columns that every row of the history carries under their own names."""

METRICS: dict[str, dict[str, str]] = {
    "steps": {
        "loss": "train/loss",
        "learning_rate": "train/learning_rate",
        "gradient_norm": "train/gradient_norm",
        "exchanged_bytes": "train/exchanged_bytes",
        "step_time_s": "time/step_time_s",
        "data_s": "time/data_s",
        "forward_backward_s": "time/forward_backward_s",
        "exchange_optimizer_s": "time/exchange_optimizer_s",
        "involuntary_switches": "time/involuntary_switches",
        "core_wait_s": "time/core_wait_s",
    },
    "evals": {
        "eval_loss": "eval/loss",
        "eval_accuracy": "eval/accuracy",
        "evaluation_s": "time/evaluation_s",
    },
}
"""Name in W&B of each mirrored column, by table."""

NOT_MIRRORED = frozenset({"attempt", "warmup", "eval_targets"})
"""Columns that mean nothing as a curve."""

_DEFAULT_AXIS = {"train": "samples", "eval": "samples", "time": "optimizer_step"}


class WandbRun:
    """A run folder and the W&B run that it is written to; one segment of it, from init to finish.

    Parameters
    ----------
    folder : RunFolder
    sweep_dir : Path
    tracker : WandbTracker
    mode : str
        `online` or `offline`.
    status : RunStatus
        How the run stands now.
    problem : str or None
        Why it is written offline although it was meant to be online.
    init_timeout_s : float
        Given to W&B, which keeps to it loosely.
    """

    def __init__(
        self,
        folder: RunFolder,
        sweep_dir: Path,
        tracker: WandbTracker,
        *,
        mode: Literal["online", "offline"],
        status: RunStatus,
        problem: str | None,
        init_timeout_s: float,
    ) -> None:
        config = run_config(folder)
        self._folder = folder
        self._tracker = tracker
        self._status = status
        self._tails = {table: _Tail(folder.lines(table)) for table in METRICS}
        self._waiting: list[tuple[int, str, Row]] = []
        self._state = MirrorState.read(folder) or MirrorState(
            id=f"{config['run_id']}-{secrets.token_hex(4)}",
            project=tracker.project,
            entity=tracker.entity,
            mode=mode,
        )
        self._discard_open_segment(sweep_dir)
        self._state.mode, self._state.problem = mode, problem
        # Before W&B hears of it: whatever happens now, the next start continues the same run.
        self._state.write(folder)
        self._run = wandb.init(
            id=self._state.id,
            name=config["run_id"],
            group=config["sweep_name"],
            project=self._state.project,
            entity=self._state.entity,
            tags=self._tags(status),
            config=config,
            dir=str(sweep_dir),
            mode=mode,
            resume="allow",
            reinit="create_new",
            allow_val_change=True,
            settings=_settings(init_timeout_s),
        )
        self._state.segments.append(Path(self._run.dir).parent.name)
        self._state.closed = False
        self._state.write(folder)
        # A server knows best which rows of a segment that was cut short have reached it.
        self._last_step = max(self._state.last_step, self._run.starting_step - 1)
        self._define_axes()

    def follow(self) -> None:
        """Mirror the rows that were written since the last call, while the run runs."""
        # The order of reading matters: an evaluation is written before any later optimizer step.
        for table in METRICS:
            self._waiting += _keyed(table, self._tails[table].read())
        reached = max((step for step, table, _ in self._waiting if table == "steps"), default=0)
        ready = max(reached, self._last_step) + 1  # the evaluation after the last known step
        self._log(row for row in self._waiting if row[0] <= ready)
        self._waiting = [row for row in self._waiting if row[0] > ready]

    def close(self, status: RunStatus) -> None:
        """Mirror all the rest of a run that has ended, and how it ended.

        Raises
        ------
        RecordError
            If what was sealed is damaged.
        """
        verify_seal(self._folder, status)
        self._log(row for table in METRICS for row in _keyed(table, self._sealed_rows(table)))
        figures = {name: status.summary.get(name) for name in SUMMARY}
        self._finish(status, figures, ok=status.status in {Status.COMPLETED, Status.PRUNED})

    def leave(self) -> None:
        """End the segment of a run that nobody runs any more; a later one goes on from here."""
        self.follow()
        self._finish(self._status, {}, ok=False)

    def _finish(self, status: RunStatus, figures: dict[str, Any], *, ok: bool) -> None:
        self._run.summary.update(
            {
                **figures,
                "status": str(status.status),
                "stop_reason": None if status.stop_reason is None else str(status.stop_reason),
                "reason": status.reason,
                "attempts": len(status.attempts),
            }
        )
        self._run.tags = self._tags(status)
        self._run.finish(exit_code=0 if ok else 1)
        self._state.last_step = self._last_step
        self._state.status, self._state.attempts = str(status.status), len(status.attempts)
        self._state.closed = True
        self._state.write(self._folder)

    def _log(self, rows: Iterator[tuple[int, str, Row]]) -> None:
        for step, table, row in sorted(rows, key=lambda keyed: keyed[0]):
            # A resumed run writes again what came after its checkpoint.
            if step <= self._last_step:
                continue
            named = {axis: row.get(axis) for axis in AXES}
            named |= {name: row.get(column) for column, name in METRICS[table].items()}
            self._run.log({k: v for k, v in named.items() if not _is_missing(v)}, step=step)
            self._last_step = step

    def _sealed_rows(self, table: str) -> list[Row]:
        rows = read_table(self._folder, table)
        new = rows[_wandb_step(table, rows["optimizer_step"]) > self._last_step]
        return list(new.to_dict("records"))

    def _define_axes(self) -> None:
        for axis in AXES:
            # Their last values belong to the summary of the run folder, not to the last row.
            self._run.define_metric(axis, hidden=True, summary="none")
        for names in METRICS.values():
            for name in names.values():
                axis = _DEFAULT_AXIS[name.partition("/")[0]]
                self._run.define_metric(name, step_metric=axis, step_sync=False)

    def _discard_open_segment(self, sweep_dir: Path) -> None:
        """Remove an offline segment that was cut short; its rows are written again, once."""
        if self._state.closed or self._state.mode != "offline":
            return
        path = wandb_folder(sweep_dir) / self._state.segments[-1]
        if path in self._state.unsent(sweep_dir):
            shutil.rmtree(path)
            self._state.segments.pop()

    def _tags(self, status: RunStatus) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self._tracker.tags, str(status.status)]))


def run_config(folder: RunFolder) -> dict[str, Any]:
    """Return what W&B shows as the config of a run.

    Groups of settings stay nested, which W&B shows as `model.name`; a dot inside a key would
    break its queries.

    Raises
    ------
    RecordError
        If a file is missing or damaged.
    """
    content = read_json(folder.config)
    config: dict[str, Any] = dict(content["config"])
    for name, value in content["resolved"].items():
        # What was planned must not pass for what was done.
        config[f"planned_{name}" if name in SUMMARY else name] = value
    config |= content["geometry"]
    config |= {name: content[name] for name in ("run_id", "trajectory_id", "sweep_name")}
    config["data_manifest_hash"] = content["data"]["manifest_hash"]
    if folder.launch.exists():
        launch = read_json(folder.launch)
        launch.pop("rendezvous", None)  # a path that is gone when the run ends
        config["launch"] = launch
    return config


def _settings(init_timeout_s: float) -> wandb.Settings:
    """Nothing but the run folder: no console, code, git, packages, or machine statistics."""
    return wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        save_code=False,
        init_timeout=init_timeout_s,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
    )


def _wandb_step(table: str, optimizer_step: Any) -> Any:  # noqa: ANN401  (an int or a Series)
    return 2 * optimizer_step + (table == "evals")


def _keyed(table: str, rows: list[Row]) -> list[tuple[int, str, Row]]:
    return [(_wandb_step(table, row["optimizer_step"]), table, row) for row in rows]


def _is_missing(value: Any) -> bool:  # noqa: ANN401  (a scalar from JSON or pandas)
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


class _Tail:
    """Reads the lines that were appended to a file since the last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0

    def read(self) -> list[Row]:
        """Return the new rows; all of them, if the file was replaced.

        Raises
        ------
        RecordError
            If a line is damaged; one without its end is left for the next time.
        """
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset = stat.st_ino, 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            msg = f"{self._path} is damaged: {error}"
            raise RecordError(msg) from None
