"""Rows of a run's tables, from what a program logged and what its processes took."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from batchscape.measure.contention import TreeWaits
from batchscape.programs.metrics import Log
from batchscape.programs.tree import RankMemory
from batchscape.record.figures import RESIDENT
from batchscape.record.files import (
    json_lines,
    read_json,
    read_json_lines,
    write_atomically,
    write_json,
)
from batchscape.record.folder import TABLES, RunFolder
from batchscape.record.spec import RunSpec
from batchscape.record.timing import SEEN_BETWEEN_ROWS, invalidate_times

_NULL_COLUMNS = ("samples", "tokens", "train_time_s", "loss")
"""Columns that readers of open runs expect in every row; null where a program does not log them."""
_LOGGED_TIMES = {"step_time_s", "train_time_s"}
_SHARE_COLUMNS = ("core_wait_s", "processor_time_s")
"""Columns that are measured from outside, as shares of the time of a step."""


class RowWriter:
    """Writes the tables `steps` and `evals` of one attempt, while the program trains."""

    def __init__(self, folder: RunFolder, spec: RunSpec, attempt: int, *, goes_on: bool) -> None:
        self.waits: TreeWaits | None = None
        """How long the program has waited for a core so far; None until it runs."""
        self._shares_by_step: dict[int, tuple[float | None, float | None]] = {}
        self._step_times_seen_s: dict[int, float] = {}
        self._is_on_cpu = spec.device_type == "cpu"
        self._last_rows_at_s = time.monotonic()
        self._folder = folder
        self._global_batch_size = spec.geometry.global_batch_size
        self._warmup = spec.config.measure.warmup_optimizer_steps
        self._attempt = attempt
        self._earlier_rows: dict[int, dict[str, Any]] = {}
        if goes_on:
            rows = read_json_lines(folder.lines("steps"))
            self._earlier_rows = {row["optimizer_step"]: row for row in rows}
        for table in ("steps", "evals") if goes_on else TABLES:
            folder.lines(table).unlink(missing_ok=True)
        self._written: dict[str, list[dict[str, Any]]] = {"steps": [], "evals": []}

    def write(self, log: Log) -> None:
        """Bring both tables up to date."""
        begin = self._last_kept(log.steps)
        if self.waits is not None:
            self._add_waits(log, begin, self.waits)
        steps = [
            self._earlier_rows[row["optimizer_step"]]
            if row["optimizer_step"] <= begin
            else self._step(row, begin)
            for row in log.steps
        ]
        attempts = {
            step: row["attempt"] for step, row in self._earlier_rows.items() if step <= begin
        }
        evals = [
            {**row, "attempt": attempts.get(row["optimizer_step"], self._attempt)}
            for row in log.evals
        ]
        for table, rows in (("steps", steps), ("evals", evals)):
            if rows != self._written[table]:
                write_atomically(self._folder.lines(table), json_lines(rows))
                self._written[table] = rows

    def _add_waits(self, log: Log, last_kept: int, waits: TreeWaits) -> None:
        """Note, for new steps, the share of time spent waiting for a core, and the cores used.

        These steps are taken to end now and to last as long as they logged, at most since the last
        rows. So a log that comes whole at the end does not count the program's start.
        """
        last = max(self._shares_by_step, default=last_kept)
        new_rows = [row for row in log.steps if row["optimizer_step"] > last]
        if not new_rows:
            return
        step_numbers = [last, *(row["optimizer_step"] for row in new_rows)]
        # A row may stand for several steps, and may not say how long its own took.
        took_s = sum(
            row.get("step_time_s", math.inf) * (after - before)
            for row, before, after in zip(new_rows, step_numbers, step_numbers[1:], strict=False)
        )
        took_s += sum(
            row.get("evaluation_s", 0.0) for row in log.evals if row["optimizer_step"] > last
        )
        now_s = time.monotonic()
        if self._shares_by_step and not any(row.keys() & _LOGGED_TIMES for row in log.steps):
            # The time before the first rows is the start of the program, not of a step.
            seen_s = (now_s - self._last_rows_at_s) / (step_numbers[-1] - last)
            if not self._step_times_seen_s:
                launch = read_json(self._folder.launch)
                invalidate_times(launch, SEEN_BETWEEN_ROWS)
                write_json(self._folder.launch, launch)
            self._step_times_seen_s |= dict.fromkeys(step_numbers[1:], seen_s)
        begin_s = max(self._last_rows_at_s, now_s - took_s)
        processors = waits.processors_since(begin_s) if self._is_on_cpu else None
        shares = waits.share_since(begin_s), processors
        self._shares_by_step |= dict.fromkeys(step_numbers[1:], shares)
        self._last_rows_at_s = now_s

    def _last_kept(self, steps: Sequence[Mapping[str, Any]]) -> int:
        """Return the last optimizer step whose row is the one of an earlier attempt."""
        last = 0
        for row in steps:
            before = self._earlier_rows.get(row["optimizer_step"])
            # This attempt does the steps after the checkpoint again.
            if before is None:
                return last
            # Compared as they are written, because NaN does not equal itself.
            if json.dumps({name: before.get(name) for name in row}) != json.dumps(row):
                return last
            last = row["optimizer_step"]
        return max(self._earlier_rows, default=0)

    def _step(self, row: Mapping[str, Any], last_kept: int) -> dict[str, Any]:
        step = row["optimizer_step"]
        shares = self._shares_by_step.get(step, (None, None))
        took_s = row.get("step_time_s", self._step_times_seen_s.get(step))
        return {
            **dict.fromkeys(_NULL_COLUMNS),
            **row,
            **({} if took_s is None else {"step_time_s": took_s}),
            **{
                name: None if share is None or took_s is None else share * took_s
                for name, share in zip(_SHARE_COLUMNS, shares, strict=True)
            },
            "attempt": self._attempt,
            "global_batch_size": self._global_batch_size,
            "warmup": row["optimizer_step"] - last_kept <= self._warmup,
        }


def diverged_at(log: Log) -> str | None:
    """Say which loss was the first that is not finite; None where all are."""
    not_finite = [
        (row["optimizer_step"], loss_name)
        for rows, key, loss_name in (
            (log.steps, "loss", "the loss"),
            (log.evals, "eval_loss", "the held-out loss"),
        )
        for row in rows
        if row.get(key) is not None and not math.isfinite(row[key])
    ]
    return (
        "{1} of optimizer step {0} is not finite".format(*min(not_finite)) if not_finite else None
    )


def rank_rows(
    ranks: Mapping[int, RankMemory],
    launch: Mapping[str, Any],
    foreign_processes: int | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of the table `ranks`: the memory of each, as seen from outside.

    On a CPU the peak of unshared resident memory stands for that of allocated memory, which only
    the program itself could tell; on CUDA devices the driver's figure is given as what it is.
    """
    is_cuda = launch["device_type"] == "cuda"
    devices = max(1, len(launch["devices"]))
    return [
        {
            "rank": number,
            "attempt": launch["attempt"],
            "node": 0,
            "node_name": os.environ.get("SLURMD_NODENAME"),
            "device": f"cuda:{number % devices}" if is_cuda else "cpu",
            "memory_method": "process tree (driver)" if is_cuda else RESIDENT,
            "peak_allocated_gib": None if is_cuda else memory.peak_uss_gib,
            "device_used_gib": memory.device_used_gib,
            "foreign_processes": foreign_processes,
            "rss_gib": memory.rss_gib,
            "uss_gib": memory.uss_gib,
            "peak_rss_gib": memory.peak_rss_gib,
        }
        for number, (_, memory) in enumerate(sorted(ranks.items()))
    ]
