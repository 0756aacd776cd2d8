"""One attempt at one run: its ranks are watched, and their end is decided and written."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from batchscape.errors import DiskError, RecordError
from batchscape.launch.devices import Lease
from batchscape.launch.ending import write_end
from batchscape.launch.hangs import HangWatch
from batchscape.launch.processes import Processes
from batchscape.measure.oom_kills import oom_kills
from batchscape.record import instants
from batchscape.record.disk import disk_trouble
from batchscape.record.files import end_of, last_row, write_json
from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec
from batchscape.record.state import decide
from batchscape.record.status import Cause, Outcome, RankExit, RunEnd, RunStatus, Status, Stop
from batchscape.record.timing import invalidate_times

STOP_GRACE_S = 20.0
"""Least time for a checkpoint between SIGTERM and SIGKILL."""
STOP_GRACE_STEPS = 4
"""Optimizer steps that may pass before the checkpoint: ranks agree to stop after a later step."""
CHECKPOINT_GRACE_S = 10.0
"""Time for the checkpoint itself, after those steps."""
PEER_GRACE_S = 5.0
"""Time for the other ranks once one has failed, or once all have written their outcomes: they may
wait for ever in a collective or for a native thread."""
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
    hangs: HangWatch
    """Closed at the end."""
    began: float = field(default_factory=time.monotonic)
    """On the monotonic clock."""
    exits: dict[int, RankExit] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """Outcomes that ranks have written so far."""
    stop: Stop | None = None
    killed_at: float | None = None
    """When this launcher killed the ranks, in seconds since the epoch."""
    _stacks_at: float | None = None
    """When the ranks of a run that hangs will have written their stacks."""
    _oom_kills_before: int | None = field(default_factory=oom_kills)
    _kill_at: float | None = None
    _end_watched_since: float | None = None
    _has_spoiled_times: bool = False

    @property
    def last_row(self) -> dict[str, Any]:
        """Latest row of optimizer steps; empty where no row can be read."""
        with contextlib.suppress(RecordError):
            return last_row(self.folder.lines("steps"))
        return {}

    @property
    def stop_grace_s(self) -> float:
        """Time between SIGTERM and SIGKILL: slow steps take longer to come to a checkpoint."""
        step_time_s = self.last_row.get("step_time_s") or 0.0
        return max(STOP_GRACE_S, STOP_GRACE_STEPS * step_time_s + CHECKPOINT_GRACE_S)

    def ask_to_stop(self, status: Status, reason: str) -> None:
        """Ask the ranks for a checkpoint and their end; they are killed if it takes too long."""
        if self.stop is None:
            cause = Cause.TIME_LIMIT if status is Status.TIMEOUT else Cause.INTERRUPTED
            self.stop = Stop(status, reason=reason, cause=cause)
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
        if self._has_spoiled_times:
            return
        self._has_spoiled_times = True
        invalidate_times(self.launch, reason)
        # Now, for the case that this launcher is killed; else `_conclude` writes it last.
        with contextlib.suppress(OSError):
            write_json(self.folder.launch, self.launch)

    def look(self, exits: Iterable[RankExit]) -> RunStatus | None:
        """Note which ranks have ended, and enforce the limits of the others.

        Parameters
        ----------
        exits : iterable of RankExit
            Of this run, those since the last look.

        Returns
        -------
        RunStatus or None
            How the run ended, already written, once no rank is left.
        """
        with contextlib.suppress(RecordError):  # the end of the run reports the damage
            self._read_outcomes()
        for ended in exits:
            self.exits[ended.rank] = ended
            if len(self.exits) < self.spec.processes and self.stop is None:
                self._note_end_of(ended.rank)
        now = time.monotonic()
        self._enforce_limits(now)
        self._watch_for_hang(now)
        return self._conclude() if len(self.exits) == self.spec.processes else None

    def _read_outcomes(self) -> None:
        """Read the outcomes that ranks have written since the last look."""
        for rank in range(self.spec.processes):
            if rank not in self.outcomes and (outcome := Outcome.read(self.folder, rank)):
                self.outcomes[rank] = outcome

    def _note_end_of(self, rank: int) -> None:
        """Limit the time of the other ranks, now that one has ended."""
        # The exit code says nothing: a rank may end with 0 and leave the others waiting for it.
        outcome = self.outcomes.get(rank)
        if outcome is None or not outcome.status.is_sealed:
            # Ranks that were asked to stop do not wait for each other; one writes the checkpoint.
            is_stopping = (
                outcome is not None
                and outcome.status is Status.INTERRUPTED
                and outcome.cause is not Cause.DISK
            )
            self._kill_within(self.stop_grace_s if is_stopping else PEER_GRACE_S)
        elif self._end_watched_since is None:
            # Also after a crash in the teardown, which costs the training nothing.
            self._end_watched_since = time.monotonic()

    def _enforce_limits(self, now: float) -> None:
        timeout_s = self.spec.config.launcher.timeout_s
        if timeout_s is not None and now - self.began > timeout_s:
            self.ask_to_stop(Status.TIMEOUT, f"not done after timeout_s = {timeout_s:g} s")
        since = self._end_watched_since
        is_watched = since is not None and self.stop is None and self._kill_at is None
        if len(self.outcomes) == self.spec.processes:
            self._kill_within(PEER_GRACE_S)
        elif is_watched and since is not None and now - since > END_GRACE_S:
            late = sorted(set(range(self.spec.processes)) - set(self.exits))
            reason = f"ranks {late} hang: others ended {END_GRACE_S:g} s ago"
            self.stop = Stop(Status.FAILED, reason=reason, cause=Cause.HANG)
            self.kill()
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()

    def _watch_for_hang(self, now: float) -> None:
        """End a run that hangs: ask all ranks for their stacks, then for their end."""
        if self._stacks_at is not None:
            if now >= self._stacks_at:
                self._keep_stacks()
                self.processes.signal(self.spec.run_id, signal.SIGTERM)
                # The watcher of a program has to end the program first.
                self._kill_within(self.stop_grace_s if self.hangs.is_program else PEER_GRACE_S)
        elif self.stop is None and not self.exits:
            hang = self.hangs.look(now)
            if hang is not None:
                self.stop = Stop(
                    Status.FAILED, reason=hang.reason, cause=Cause.HANG, rank=hang.rank
                )
                self._stacks_at = now
                if not self.hangs.is_program:
                    self._stacks_at += STACKS_GRACE_S
                    self.processes.signal(self.spec.run_id, signal.SIGUSR1)

    def _keep_stacks(self) -> None:
        self._stacks_at = None
        self.hangs.write_stacks(self.folder.log)

    def _kill_within(self, grace_s: float) -> None:
        at = time.monotonic() + grace_s
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def _conclude(self) -> RunStatus:
        """Write how the run ended: sealed if that is final, else open for the next attempt."""
        # Rows that cannot be read, or a disk that is full, end this run, not the sweep.
        if self._stacks_at is not None:
            self._keep_stacks()
        try:
            run_end = self._decide_end()
            if self._has_spoiled_times:
                write_json(self.folder.launch, self.launch)
            ended_at, ranks = self._ended_at(), self.lease.ranks
            write_end(self.folder, self.status, run_end, ranks, ended_at=ended_at)
        except DiskError as error:
            self.abandon(str(error), Cause.DISK, Status.INTERRUPTED)
        except RecordError as error:
            self.abandon(f"its records are damaged: {error}", Cause.DAMAGED_RECORDS)
        except OSError as error:
            self.abandon(f"its end cannot be recorded: {error}")
        self.hangs.close()
        return self.status

    def abandon(
        self,
        reason: str,
        cause: Cause = Cause.INFRASTRUCTURE,
        status: Status = Status.FAILED,
    ) -> None:
        """Write how the run ended where its ranks do not say so, if anything can be written."""
        run_end = RunEnd(status, reason=reason, cause=cause)
        self.status.note_end(run_end, self._ended_at())
        self.status.seal = {}
        with contextlib.suppress(OSError):
            self.status.write(self.folder.status)

    def _ended_at(self) -> float:
        return self.status.attempts[-1].started_at + time.monotonic() - self.began

    def _decide_end(self) -> RunEnd:
        self._read_outcomes()
        printed = end_of(self.folder.log, _LOG_TAIL_BYTES, self.log_offset)
        lines = [line.strip() for line in printed.decode(errors="replace").split("\n")]
        kills_before, kills = self._oom_kills_before, oom_kills()
        run_end = decide(
            self.spec.processes,
            self.outcomes,
            self.exits,
            self.stop,
            next((line for line in reversed(lines) if line), None),
            killed_at=self.killed_at,
            oom_kills=0 if kills_before is None or kills is None else kills - kills_before,
            device_type=self.spec.device_type,
        )
        if run_end.rank is not None and run_end.phase is None:
            beat = self.hangs.last(run_end.rank)
            run_end = replace(run_end, phase=None if beat is None else str(beat.phase))
        if run_end.cause is Cause.EXCEPTION and run_end.rank not in self.outcomes:
            # A rank that meets a full disk cannot say so: neither its outcome nor its log is taken.
            trouble = disk_trouble(self.folder.path)
            if trouble is not None:
                return replace(run_end, status=Status.INTERRUPTED, reason=trouble, cause=Cause.DISK)
        return run_end
