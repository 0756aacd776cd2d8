"""One run folder as one W&B run: what of it is mirrored, under which names.

==============  =====================================================================
W&B             run folder
==============  =====================================================================
name, group     `run_id`, `sweep_name`
config          geometry, identity and resolved settings as columns; all settings,
                nested; how the processes were launched (`launch.devices`, ...)
history         one row an optimizer step, one an evaluation; every row carries all axes, the
                last one also the figures of the run, each of which so makes a panel of bars
axes            `samples` for losses, `optimizer_step` for times; `tokens` and
                `train_time_s` to choose from
summary         the summary of `status.json`, with status, stop reason and reason; times only
                where they count, and `timing_valid` and `timing_invalid_reason` beside them
tags            those of the tracker, the status, and `timing_invalid` where no time counts
state           finished for a completed or pruned run, else failed
==============  =====================================================================

Names in W&B are in `record.wandb_names`. Missing values are left out of rows; as in the tables, a
loss that is not a number is missing.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import wandb

from batchscape.config import WandbTracker
from batchscape.credentials import redact
from batchscape.errors import RecordError
from batchscape.outgoing import outgoing
from batchscape.record.folder import RunFolder
from batchscape.record.mirror_state import MirrorState, content_of, id_of, wandb_folder
from batchscape.record.status import RunStatus, Status
from batchscape.record.summary import SUMMARY
from batchscape.record.tables import read_table, verify_seal
from batchscape.record.tail import Tail
from batchscape.record.timing import TIMES, VERDICT, timed_figures, why_run_untimed
from batchscape.record.wandb_config import run_config, run_settings
from batchscape.record.wandb_memory import memory_page
from batchscape.record.wandb_names import (
    AXES,
    CURVES,
    FIGURES,
    RANK_MEMORY,
    TIMES_OF_STEPS,
    Row,
    axis_of,
    curve_points,
    figure_points,
    mirrored_names,
)

__all__ = ["UNTIMED", "WandbRun"]

UNTIMED = "timing_invalid"
"""Tag of a run whose times do not count."""


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
    patience_s : float
        Time that W&B has to open the run, which it keeps to loosely, and to show its end.
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
        patience_s: float,
    ) -> None:
        config = run_config(folder)
        self._folder = folder
        self._sweep_dir = sweep_dir
        self._tracker = tracker
        self._status = status
        self._patience_s = patience_s
        self._tails = {table: Tail(folder.lines(table)) for table in CURVES}
        self._waiting: list[tuple[int, str, Row]] = []
        self._state = MirrorState.read(folder) or MirrorState(
            id=id_of(sweep_dir, config["run_id"]),
            project=tracker.project,
            entity=tracker.entity,
            mode=mode,
        )
        self._discard_open_segment()
        # Before W&B hears of it: whatever happens now, the next start continues the same run. Its
        # mode and what was mirrored stay as they were: nothing of this segment is anywhere yet.
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
            settings=run_settings(patience_s),
        )
        self._state.segments.append(Path(self._run.dir).parent.name)
        self._state.mode, self._state.problem = mode, problem
        self._state.closed = False
        try:
            self._state.write(folder)
        except RecordError:
            self._run.finish(exit_code=1)
            raise
        self._last_step = self._where_to_go_on()
        self._tokens: int | None = 0
        self._may_add_figures = False
        self._define_axes()

    def follow(self) -> None:
        """Mirror the rows that were written since the last call, while the run runs."""
        # The order of reading matters: an evaluation is written before any later optimizer step.
        for table in CURVES:
            self._waiting += _keyed(table, self._tails[table].read())
        reached = max((step for step, table, _ in self._waiting if table == "steps"), default=0)
        ready = max(reached, self._last_step) + 1  # the evaluation after the last known step
        self._log(row for row in self._waiting if row[0] <= ready)
        self._waiting = [row for row in self._waiting if row[0] > ready]

    def close(self, status: RunStatus) -> bool:
        """Mirror all the rest of a run that has ended, and how it ended.

        Returns
        -------
        bool
            Whether all of it has arrived: on the disk, or at the server.

        Raises
        ------
        RecordError
            If what was sealed is damaged.
        """
        verify_seal(self._folder, status)
        self._log(row for table in CURVES for row in _keyed(table, self._sealed_rows(table)))
        if self._may_add_figures:
            # W&B takes what else is logged at the latest step as a part of its row.
            self._run.log(self._end_points(status), step=self._last_step)
        figures = {name: status.summary.get(name) for name in SUMMARY}
        return self._finish(status, figures, ok=status.status in {Status.COMPLETED, Status.PRUNED})

    def drop(self) -> None:
        """End the segment of a run that cannot be read, without a note: it is not mirrored."""
        self._run.finish(exit_code=1)

    def leave(self) -> None:
        """End the segment of a run that nobody runs any more; a later one goes on from here."""
        self.follow()
        self._finish(self._status, {}, ok=False)

    def _end_points(self, status: RunStatus) -> dict[str, Any]:
        points = figure_points(timed_figures(status.summary, self._untimed(status)))
        page = memory_page(read_table(self._folder, "ranks"))
        return points if page is None else points | {RANK_MEMORY: wandb.Html(page, inject=False)}

    def _finish(self, status: RunStatus, figures: dict[str, Any], *, ok: bool) -> bool:
        untimed = self._untimed(status)
        self._run.summary.update(
            {
                **timed_figures(figures, untimed),
                **dict(zip(VERDICT, (untimed is None, untimed), strict=True)),
                "status": str(status.status),
                "stop_reason": None if status.stop_reason is None else str(status.stop_reason),
                "reason": None if status.reason is None else outgoing(status.reason),
                "attempts": len(status.attempts),
            }
        )
        if untimed is not None:
            # An attempt that ended before may have left them there.
            for name in TIMES:
                for key in (name, FIGURES.get(name, name)):
                    del self._run.summary[key]  # type: ignore[no-untyped-call]  # wandb's
        self._run.tags = self._tags(status)
        path = self._run.path
        self._run.finish(exit_code=0 if ok else 1)
        state = self._state
        if state.mode == "online":
            # W&B's own finish returns in silence when an upload was refused for good.
            if not _has_ended_there(path, "finished" if ok else "failed", self._patience_s):
                return False
            state.uploaded_step = self._last_step
            state.mark_sent(self._sweep_dir)
        state.last_step = self._last_step
        state.status, state.attempts = str(status.status), len(status.attempts)
        state.content = content_of(status)
        state.closed = True
        state.write(self._folder)
        return True

    def _log(self, rows: Iterator[tuple[int, str, Row]]) -> None:
        for step, table, row in sorted(rows, key=lambda keyed: keyed[0]):
            tokens_before = self._tokens
            if table == "steps":
                self._tokens = row.get("tokens")
            # A resumed run writes again what came after its checkpoint.
            if step <= self._last_step:
                continue
            self._run.log(curve_points(table, row, tokens_before), step=step)
            self._last_step = step
            self._may_add_figures = True

    def _sealed_rows(self, table: str) -> list[Row]:
        rows = read_table(self._folder, table)
        known = int((_wandb_step(table, rows["optimizer_step"]) <= self._last_step).sum())
        # With the last known row: the next one's tokens are counted from there.
        new = rows.iloc[max(known - 1, 0) :].to_dict("records")
        return [{str(name): value for name, value in row.items()} for row in new]

    def _where_to_go_on(self) -> int:
        """Return the W&B step of the last row that need not be mirrored again."""
        if self._state.mode == "offline":
            return max(self._state.last_step, self._state.uploaded_step)
        # A server knows best which rows have reached it, also of segments that were cut short or
        # uploaded by hand. What is only on the disk is mirrored again, in order.
        return max(self._state.uploaded_step, self._run.starting_step - 1)

    def _define_axes(self) -> None:
        for axis in AXES:
            # Their last values belong to the summary of the run folder, not to the last row.
            self._run.define_metric(axis, hidden=True, summary="none")
        for name in mirrored_names():
            # Nor does the time of one step belong there, whether or not it counts.
            last = "none" if name in TIMES_OF_STEPS else None
            self._run.define_metric(name, step_metric=axis_of(name), step_sync=False, summary=last)

    def _discard_open_segment(self) -> None:
        """Remove an offline segment that was cut short; its rows are written again, once."""
        self._state.forget_strays(self._sweep_dir)
        if self._state.closed or self._state.mode != "offline" or not self._state.segments:
            return
        path = wandb_folder(self._sweep_dir) / self._state.segments[-1]
        if path in self._state.unsent(self._sweep_dir):
            shutil.rmtree(path)
            self._state.segments.pop()
            # What is left is what was mirrored up to the last segment that was closed.
            self._state.closed = True

    def _tags(self, status: RunStatus) -> tuple[str, ...]:
        untimed = [UNTIMED] if self._untimed(status) is not None else []
        return tuple(
            dict.fromkeys([*map(outgoing, self._tracker.tags), str(status.status), *untimed])
        )

    def _untimed(self, status: RunStatus) -> str | None:
        """Say why its times do not count, by all that is known now; None where they do."""
        return why_run_untimed(self._folder, status)


def _wandb_step(table: str, optimizer_step: Any) -> Any:  # noqa: ANN401  (an int or a Series)
    return 2 * optimizer_step + (table == "evals")


def _keyed(table: str, rows: Sequence[Row]) -> list[tuple[int, str, Row]]:
    return [(_wandb_step(table, row["optimizer_step"]), table, row) for row in rows]


def _has_ended_there(path: str, state: str, patience_s: float) -> bool:
    """Whether the server shows a run in its end state, which it enters after the last row."""
    deadline = time.monotonic() + patience_s
    said = "it is still running there"
    while True:
        try:
            # Anew each time: it answers from memory.
            if wandb.Api(timeout=math.ceil(patience_s)).run(path).state == state:
                return True
        except Exception as error:  # noqa: BLE001  (W&B raises errors of many families)
            said = str(error)
        if time.monotonic() > deadline:
            sys.stderr.write(redact(f"the end of {path} has not arrived: {said}\n"))
            return False
        time.sleep(patience_s / 20)
