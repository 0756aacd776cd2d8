"""One attempt at one run: its folder made ready, its ranks watched, its end written down."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batchscape.config import Command
from batchscape.errors import DamageError, DiskError, RecordError
from batchscape.launch.child import RankExit
from batchscape.launch.finishing import clear_away
from batchscape.launch.hangs import HangWatch
from batchscape.launch.launch_record import invalidate_times
from batchscape.launch.outcome import Outcome, Stop, Verdict, decide
from batchscape.launch.pool import Lease
from batchscape.launch.processes import Processes
from batchscape.launch.progress_text import last_row
from batchscape.measure.oom_kills import oom_kills
from batchscape.record import instants
from batchscape.record.causes import Cause
from batchscape.record.disk import disk_trouble, make_room
from batchscape.record.files import read_json_lines, write_json
from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import note_rows, seal

__all__ = ["ActiveRun"]

STOP_GRACE_S = 20.0
"""Least time for a checkpoint between SIGTERM and SIGKILL."""
STOP_GRACE_STEPS = 4
"""Optimizer steps that may pass as well: ranks agree on a stop at the end of some later one."""
CHECKPOINT_GRACE_S = 10.0
"""Time for the checkpoint itself, after those steps."""
PEER_GRACE_S = 5.0
"""Time for the other ranks once one has failed, or once all have left their outcomes: they may
wait in a collective, or for a native thread, for ever."""
STACKS_GRACE_S = 1.0
"""Time for ranks that hang to dump their stacks before they are asked to end."""
END_GRACE_S = 300.0
"""Time for the other ranks once one has come to the end, completed or diverged."""

_LOG_TAIL_BYTES = 4096


@dataclass
class ActiveRun:
    """A run whose ranks have been started."""

    spec: RunSpec
    folder: RunFolder
    status: RunStatus
    lease: Lease
    processes: Processes
    log_offset: int
    """Size of the log before this attempt."""
    launch: dict[str, Any]
    """Content of `launch.json`."""
    began: float = field(default_factory=time.monotonic)
    """On the monotonic clock."""
    exits: dict[int, RankExit] = field(default_factory=dict)
    stop: Stop | None = None
    killed_at: float | None = None
    """When this launcher killed the ranks, in seconds since the epoch."""
    hangs: HangWatch | None = None
    _stacks_at: float | None = None
    """When the ranks of a run that hangs have written their stacks."""
    _oom_kills_before: int | None = field(default_factory=oom_kills)
    _kill_at: float | None = None
    _watching_end_since: float | None = None
    _spoiled: bool = False

    @property
    def processes_of_run(self) -> int:
        """One a rank; one in all where it starts a program, which starts the ranks."""
        return 1 if isinstance(self.spec.config.engine, Command) else self.lease.ranks

    @property
    def has_ended(self) -> bool:
        """Whether no rank is left."""
        return len(self.exits) == self.processes_of_run

    @property
    def stop_grace_s(self) -> float:
        """Time between SIGTERM and SIGKILL: slow steps take longer to come to a checkpoint."""
        row = last_row(self.folder.lines("steps")) or {}
        step_time_s = row.get("step_time_s") or 0.0
        return max(STOP_GRACE_S, STOP_GRACE_STEPS * step_time_s + CHECKPOINT_GRACE_S)

    def ask_to_stop(self, status: Status, reason: str) -> None:
        """Ask the ranks for a checkpoint and their end; they are killed if it takes too long."""
        if self.stop is None:
            cause = Cause.TIME_LIMIT if status is Status.TIMEOUT else Cause.INTERRUPTED
            self.stop = Stop(status, reason, instants.now(), cause)
            self._kill_within(self.stop_grace_s)
            self.processes.signal(self.spec.run_id, signal.SIGTERM)

    def kill(self) -> None:
        """End all ranks now."""
        self._kill_at = None
        if self.killed_at is None:
            self.killed_at = instants.now()
        self.processes.signal(self.spec.run_id, signal.SIGKILL)

    def spoil_times(self, reason: str) -> None:
        """Keep the times of this run out of comparisons."""
        if self._spoiled:
            return
        self._spoiled = True
        invalidate_times(self.launch, reason)
        # Now, for the case that this launcher is killed; else `conclude` has the last word.
        with contextlib.suppress(OSError):
            write_json(self.folder.launch, self.launch)

    def note(self, ended: RankExit) -> None:
        """Take note of a rank's end."""
        self.exits[ended.rank] = ended
        if self.has_ended or self.stop is not None:
            return
        # Its exit code says nothing: a rank may end with 0 and leave the others waiting for it.
        said = self._word_of(ended.rank)
        if said is None or not said.is_sealed:
            # Ranks that somebody has asked to stop wait for nobody; one writes the checkpoint.
            is_asked = said is Status.INTERRUPTED
            self._kill_within(self.stop_grace_s if is_asked else PEER_GRACE_S)
        elif self._watching_end_since is None:
            # Also after a crash in the teardown, which takes nothing from the training.
            self._watching_end_since = time.monotonic()

    def _word_of(self, rank: int) -> Status | None:
        """Return how a rank says that it ended; None where it says nothing."""
        try:
            return Outcome.read(self.folder.outcome(rank)).status
        except RecordError:
            return None

    def watch(self) -> None:
        """Enforce the time limits."""
        now = time.monotonic()
        timeout_s = self.spec.config.launcher.timeout_s
        if timeout_s is not None and now - self.began > timeout_s:
            self.ask_to_stop(Status.TIMEOUT, f"not done after timeout_s = {timeout_s:g} s")
        if all(self.folder.outcome(rank).exists() for rank in range(self.processes_of_run)):
            self._kill_within(PEER_GRACE_S)
        elif self._end_is_overdue(now):
            late = sorted(set(range(self.processes_of_run)) - set(self.exits))
            reason = f"ranks {late} hang: others ended {END_GRACE_S:g} s ago"
            self.stop = Stop(Status.FAILED, reason, instants.now(), Cause.HANG)
            self.kill()
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()
        self._watch_for_hang(now)

    def _watch_for_hang(self, now: float) -> None:
        """End a run that hangs: ask all ranks for their stacks, then for their end."""
        if self._stacks_at is not None:
            if now >= self._stacks_at:
                self._keep_stacks()
                self.processes.signal(self.spec.run_id, signal.SIGTERM)
                # Whoever watches a program has to end it first.
                program = self.hangs is not None and self.hangs.is_program
                self._kill_within(self.stop_grace_s if program else PEER_GRACE_S)
        elif self.stop is None and self.hangs is not None and not self.exits:
            hang = self.hangs.look(now)
            if hang is not None:
                self.stop = Stop(Status.FAILED, hang.reason, instants.now(), Cause.HANG, hang.rank)
                self._stacks_at = now
                if not self.hangs.is_program:
                    self._stacks_at += STACKS_GRACE_S
                    self.processes.signal(self.spec.run_id, signal.SIGUSR1)

    def _keep_stacks(self) -> None:
        self._stacks_at = None
        if self.hangs is not None:
            self.hangs.write_stacks(self.folder.log)

    def _end_is_overdue(self, now: float) -> bool:
        if self._watching_end_since is None or self.stop is not None or self._kill_at is not None:
            return False
        return now - self._watching_end_since > END_GRACE_S

    def _kill_within(self, grace_s: float) -> None:
        at = time.monotonic() + grace_s
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def conclude(self) -> RunStatus:
        """Write how the run ended: sealed if that is final, else open for the next attempt."""
        # Rows that cannot be read, or a disk that is full, end this run, not the sweep.
        if self._stacks_at is not None:
            self._keep_stacks()
        try:
            verdict = self._verdict()
            try:
                self._record(verdict)
            except DiskError:
                if not make_room(self.folder.path.parents[1]):
                    raise
                self._record(verdict)
        except RecordError as error:
            self.abandon(f"its records are damaged: {error}", Cause.DAMAGED_RECORDS)
        except OSError as error:
            cause = Cause.DISK if isinstance(error, DiskError) else Cause.INFRASTRUCTURE
            self.abandon(f"its end cannot be recorded: {error}", cause)
        if self.hangs is not None:
            self.hangs.close()
        return self.status

    def _record(self, verdict: Verdict) -> None:
        self._fill_in(verdict)
        if self._spoiled:
            write_json(self.folder.launch, self.launch)
        self._write()

    def abandon(self, reason: str, cause: Cause = Cause.INFRASTRUCTURE) -> None:
        """Write that the run failed by no word of its ranks, if anything can be written."""
        self._fill_in(Verdict(Status.FAILED, reason=reason, cause=cause))
        self.status.seal = {}
        with contextlib.suppress(OSError):
            self.status.write(self.folder.status)

    def _write(self) -> None:
        attempts = self.status.attempts
        attempts[-1].from_optimizer_step = _went_on_from(self.folder, len(attempts) - 1)
        if self.status.status.is_sealed:
            seal(self.folder, self.status, self.lease.ranks)
            clear_away(self.folder)
            return
        note_rows(self.folder, self.status, self.lease.ranks)
        self.status.write(self.folder.status)

    def _verdict(self) -> Verdict:
        outcomes = {
            rank: Outcome.read(self.folder.outcome(rank))
            for rank in range(self.processes_of_run)
            if self.folder.outcome(rank).exists()
        }
        last_words = _last_line(self.folder.log, self.log_offset)
        verdict = decide(
            self.processes_of_run,
            outcomes,
            self.exits,
            self.stop,
            last_words,
            killed_at=self.killed_at,
            oom_kills=self._oom_kills_since(),
        )
        if verdict.cause is not Cause.EXCEPTION or verdict.rank in outcomes:
            return verdict
        # A rank that meets a full disk cannot say so: neither its outcome nor its log is taken.
        trouble = disk_trouble(self.folder.path)
        if trouble is None:
            return verdict
        return replace(verdict, reason=f"{trouble}; {verdict.reason}", cause=Cause.DISK)

    def _oom_kills_since(self) -> int:
        """Return the kills by the out-of-memory killer that were counted during this attempt."""
        before, now = self._oom_kills_before, oom_kills()
        return 0 if before is None or now is None else now - before

    def _fill_in(self, verdict: Verdict) -> None:
        self.status.status = verdict.status
        self.status.stop_reason = verdict.stop_reason
        self.status.reason = verdict.reason
        self.status.cause = verdict.cause
        self.status.rank = verdict.rank
        self.status.phase = self._phase_of(verdict)
        self.status.peak_memory_gib = verdict.peak_memory_gib
        self.status.peak_memory_method = verdict.peak_memory_method
        attempt = self.status.attempts[-1]
        attempt.ended_at = attempt.started_at + time.monotonic() - self.began
        attempt.status = str(verdict.status)
        attempt.reason = verdict.reason
        attempt.cause = None if verdict.cause is None else str(verdict.cause)

    def _phase_of(self, verdict: Verdict) -> str | None:
        """Return what the rank that raised the cause was doing, by its word or its last beat."""
        if verdict.cause is None or verdict.phase is not None:
            return verdict.phase if verdict.cause is not None else None
        if verdict.rank is None or self.hangs is None:
            return None
        beat = self.hangs.last(verdict.rank)
        return None if beat is None else str(beat.phase)


def _went_on_from(folder: RunFolder, attempt: int) -> int:
    """Return the optimizer steps that were done before an attempt, by the rows that it kept."""
    done = 0
    path = folder.lines("steps")
    for row in read_json_lines(path):
        try:
            written_by, step = int(row["attempt"]), int(row["optimizer_step"])
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{path} is damaged: a row lacks its attempt or optimizer step ({error!r})"
            raise DamageError(msg) from None
        if written_by == attempt:
            return step - 1
        done = step
    return done


def _last_line(log: Path, offset: int) -> str | None:
    """Return the last line that was printed since `offset`; None where nothing was."""
    if not log.exists():
        return None
    with log.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(offset, end - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), None)
