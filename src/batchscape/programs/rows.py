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
from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec
from batchscape.record.timing import SEEN_BETWEEN_ROWS, invalidate_times

_SHOWN = ("samples", "tokens", "train_time_s", "loss")
"""What readers of open runs look for in every row; a program may not log it."""
_LOGGED_TIMES = {"step_time_s", "train_time_s"}
_TAKEN = ("core_wait_s", "processor_time_s")
"""What is measured from outside, and no program logs."""


class RowWriter:
    """Writes the tables `steps` and `evals` of one attempt, while the program trains."""

    def __init__(self, folder: RunFolder, spec: RunSpec, attempt: int, *, goes_on: bool) -> None:
        self.waits: TreeWaits | None = None
        """What the program has waited for a core so far; None until it runs."""
        self._taken: dict[int, tuple[float | None, float | None]] = {}
        self._seen_s: dict[int, float] = {}
        self._on_cpu = spec.device_type == "cpu"
        self._came_s = time.monotonic()
        self._folder = folder
        self._global_batch_size = spec.geometry.global_batch_size
        self._warmup = spec.config.measure.warmup_optimizer_steps
        self._attempt = attempt
        self._before: dict[int, dict[str, Any]] = {}
        if goes_on:
            rows = read_json_lines(folder.lines("steps"))
            self._before = {row["optimizer_step"]: row for row in rows}
        for table in ("steps", "evals", "ranks"):
            if not (goes_on and table == "ranks"):
                folder.lines(table).unlink(missing_ok=True)
        self._written: dict[str, list[dict[str, Any]]] = {"steps": [], "evals": []}

    def write(self, log: Log) -> None:
        """Bring both tables up to date."""
        begin = self._last_kept(log.steps)
        if self.waits is not None:
            self._add_waits(log, begin, self.waits)
        steps = [self._step(row, begin) for row in log.steps]
        evals = [{**row, "attempt": self._attempt_of(row, begin)} for row in log.evals]
        for table, rows in (("steps", steps), ("evals", evals)):
            if rows != self._written[table]:
                write_atomically(self._folder.lines(table), json_lines(rows))
                self._written[table] = rows

    def clear(self) -> None:
        """Remove all rows: they are of another batch than their columns say."""
        self.write(Log())

    def _add_waits(self, log: Log, kept: int, waits: TreeWaits) -> None:
        """Give the steps that are new the share of the time that the program waited for a core.

        And the cores that it was on in that time.

        The time is that since the last ones came, of which the last that they say they took: where
        a log comes whole, at the end, the start of the program is not their time.
        """
        last = max(self._taken, default=kept)
        new = [row for row in log.steps if row["optimizer_step"] > last]
        if not new:
            return
        done = [last, *(int(row["optimizer_step"]) for row in new)]
        # A row may be the only one of several steps, and may not say how long its own took.
        took_s = sum(
            row.get("step_time_s", math.inf) * (after - before)
            for row, before, after in zip(new, done, done[1:], strict=False)
        )
        took_s += sum(
            row.get("evaluation_s", 0.0) for row in log.evals if row["optimizer_step"] > last
        )
        now_s = time.monotonic()
        if self._taken and not any(row.keys() & _LOGGED_TIMES for row in log.steps):
            # Before the first rows is the start of the program, which is no step's time.
            seen_s = (now_s - self._came_s) / (done[-1] - last)
            if not self._seen_s:
                launch = read_json(self._folder.launch)
                invalidate_times(launch, SEEN_BETWEEN_ROWS)
                write_json(self._folder.launch, launch)
            self._seen_s |= dict.fromkeys(done[1:], seen_s)
        begin_s = max(self._came_s, now_s - took_s)
        processors = waits.processors_since(begin_s) if self._on_cpu else None
        taken = waits.share_since(begin_s), processors
        self._taken |= {int(row["optimizer_step"]): taken for row in new}
        self._came_s = now_s

    def _last_kept(self, steps: Sequence[Mapping[str, Any]]) -> int:
        """Return the last optimizer step whose row is the one of an earlier attempt."""
        last = 0
        for row in steps:
            before = self._before.get(row["optimizer_step"])
            # Steps beyond its checkpoint are done once more, and are of this attempt then.
            if before is None:
                return last
            # As they are written: what is not a number is the same.
            if json.dumps({name: before.get(name) for name in row}) != json.dumps(dict(row)):
                return last
            last = int(row["optimizer_step"])
        return max(self._before, default=0)

    def _step(self, row: Mapping[str, Any], kept: int) -> dict[str, Any]:
        attempt = self._attempt_of(row, kept)
        begin = kept if attempt == self._attempt else 0
        step = int(row["optimizer_step"])
        if attempt != self._attempt:
            before = self._before[step]
            taken_s = {name: before.get(name) for name in _TAKEN}
            took_s = row.get("step_time_s", before.get("step_time_s"))
        else:
            shares = self._taken.get(step, (None, None))
            took_s = row.get("step_time_s", self._seen_s.get(step))
            taken_s = {
                name: None if share is None or took_s is None else share * took_s
                for name, share in zip(_TAKEN, shares, strict=True)
            }
        return {
            **dict.fromkeys(_SHOWN),
            **row,
            **({} if took_s is None else {"step_time_s": took_s}),
            **taken_s,
            "attempt": attempt,
            "global_batch_size": self._global_batch_size,
            "warmup": row["optimizer_step"] - begin <= self._warmup,
        }

    def _attempt_of(self, row: Mapping[str, Any], kept: int) -> int:
        step = int(row["optimizer_step"])
        if step > kept or step not in self._before:
            return self._attempt
        return int(self._before[step]["attempt"])


def diverged_at(log: Log) -> str | None:
    """Say which loss was the first that is not finite; None where all are."""
    bad = [
        (int(row["optimizer_step"]), what)
        for rows, key, what in (
            (log.steps, "loss", "the loss"),
            (log.evals, "eval_loss", "the held-out loss"),
        )
        for row in rows
        if row.get(key) is not None and not math.isfinite(row[key])
    ]
    if not bad:
        return None
    step, what = min(bad)
    return f"{what} of optimizer step {step} is not finite"


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
    rows = []
    for number, (_, memory) in enumerate(sorted(ranks.items())):
        row: dict[str, Any] = {
            "rank": number,
            "attempt": launch["attempt"],
            "node": 0,
            "node_name": os.environ.get("SLURMD_NODENAME"),
            "device": f"cuda:{number % devices}" if is_cuda else "cpu",
            "memory_method": "process tree (driver)" if is_cuda else RESIDENT,
            "peak_allocated_gib": None if is_cuda else memory.peak_uss_gib,
            "device_used_gib": memory.device_gib,
            "foreign_processes": foreign_processes,
            "rss_gib": memory.rss_gib,
            "uss_gib": memory.uss_gib,
            "peak_rss_gib": memory.peak_rss_gib,
        }
        rows.append(row)
    return rows
