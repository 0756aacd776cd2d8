"""One attempt at one run: its ranks are watched, and their end is judged and written down."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from batchscape.errors import DiskError, RecordError
from batchscape.launch.devices import Lease
from batchscape.launch.ending import note_end, write_end
from batchscape.launch.hangs import HangWatch
from batchscape.launch.processes import Processes
from batchscape.measure.oom_kills import oom_kills
from batchscape.record import instants
from batchscape.record.causes import Cause
from batchscape.record.disk import disk_trouble
from batchscape.record.files import end_of, last_row, write_json
from batchscape.record.folder import RunFolder
from batchscape.record.outcome import Outcome, RankExit, RunEnd, Stop, decide
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status
from batchscape.record.timing import invalidate_times

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
    hangs: HangWatch
    """Closed at the end."""
    began: float = field(default_factory=time.monotonic)
    """On the monotonic clock."""
    exits: dict[int, RankExit] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """What ranks have left behind so far."""
    stop: Stop | None = None
    killed_at: float | None = None
    """When this launcher killed the ranks, in seconds since the epoch."""
    _stacks_at: float | None = None
    """When the ranks of a run that hangs have written their stacks."""
    _oom_kills_before: int | None = field(default_factory=oom_kills)
    _kill_at: float | None = None
    _watching_end_since: float | None = None
    _spoiled: bool = False

    @property
    def last_row(self) -> dict[str, Any]:
        """Latest row of optimizer steps; empty where there is none that can be read."""
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
        # Now, for the case that this launcher is killed; else `_conclude` has the last word.
        with contextlib.suppress(OSError):
            write_json(self.folder.launch, self.launch)

    def look(self, exits: Iterable[RankExit]) -> RunStatus | None:
        """Take note of ranks that have ended, and keep the rest to their limits.

        Parameters
        ----------
        exits : iterable of RankExit
            Of this run, those since the last look.

        Returns
        -------
        RunStatus or None
            How the run ended, which is written down, once no rank is left.
        """
        with contextlib.suppress(RecordError):  # what is damaged is told at the end
            self._hear()
        for ended in exits:
            self.exits[ended.rank] = ended
            if len(self.exits) < self.spec.processes and self.stop is None:
                self._note_end_of(ended.rank)
        now = time.monotonic()
        self._enforce_limits(now)
        self._watch_for_hang(now)
        return self._conclude() if len(self.exits) == self.spec.processes else None

    def _hear(self) -> None:
        """Read what ranks have left behind since the last time."""
        for rank in range(self.spec.processes):
            if rank not in self.outcomes and (said := Outcome.read(self.folder, rank)):
                self.outcomes[rank] = said

    def _note_end_of(self, rank: int) -> None:
        """Give the other ranks the time that they may need, now that one has ended."""
        # Its exit code says nothing: a rank may end with 0 and leave the others waiting for it.
        said = self.outcomes.get(rank)
        if said is None or not said.status.is_sealed:
            # Ranks that somebody has asked to stop wait for nobody; one writes the checkpoint.
            is_asked = (
                said is not None
                and said.status is Status.INTERRUPTED
                and said.cause is not Cause.DISK
            )
            self._kill_within(self.stop_grace_s if is_asked else PEER_GRACE_S)
        elif self._watching_end_since is None:
            # Also after a crash in the teardown, which takes nothing from the training.
            self._watching_end_since = time.monotonic()

    def _enforce_limits(self, now: float) -> None:
        timeout_s = self.spec.config.launcher.timeout_s
        if timeout_s is not None and now - self.began > timeout_s:
            self.ask_to_stop(Status.TIMEOUT, f"not done after timeout_s = {timeout_s:g} s")
        since = self._watching_end_since
        is_watched = since is not None and self.stop is None and self._kill_at is None
        if len(self.outcomes) == self.spec.processes:
            self._kill_within(PEER_GRACE_S)
        elif is_watched and since is not None and now - since > END_GRACE_S:
            late = sorted(set(range(self.spec.processes)) - set(self.exits))
            reason = f"ranks {late} hang: others ended {END_GRACE_S:g} s ago"
            self.stop = Stop(Status.FAILED, reason, instants.now(), Cause.HANG)
            self.kill()
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()

    def _watch_for_hang(self, now: float) -> None:
        """End a run that hangs: ask all ranks for their stacks, then for their end."""
        if self._stacks_at is not None:
            if now >= self._stacks_at:
                self._keep_stacks()
                self.processes.signal(self.spec.run_id, signal.SIGTERM)
                # Whoever watches a program has to end it first.
                self._kill_within(self.stop_grace_s if self.hangs.is_program else PEER_GRACE_S)
        elif self.stop is None and not self.exits:
            hang = self.hangs.look(now)
            if hang is not None:
                self.stop = Stop(Status.FAILED, hang.reason, instants.now(), Cause.HANG, hang.rank)
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
            self._write(self._judge())
        except DiskError as error:
            self.abandon(str(error), Cause.DISK, Status.INTERRUPTED)
        except RecordError as error:
            self.abandon(f"its records are damaged: {error}", Cause.DAMAGED_RECORDS)
        except OSError as error:
            self.abandon(f"its end cannot be recorded: {error}")
        self.hangs.close()
        return self.status

    def _write(self, run_end: RunEnd) -> None:
        if self._spoiled:
            write_json(self.folder.launch, self.launch)
        ended_at, ranks = self._ended_at(), self.lease.ranks
        write_end(self.folder, self.status, run_end, ranks, ended_at=ended_at)

    def abandon(
        self,
        reason: str,
        cause: Cause = Cause.INFRASTRUCTURE,
        status: Status = Status.FAILED,
    ) -> None:
        """Write that the run ended by no word of its ranks, if anything can be written."""
        run_end = RunEnd(status, reason=reason, cause=cause)
        note_end(self.status, run_end, self._ended_at())
        self.status.seal = {}
        with contextlib.suppress(OSError):
            self.status.write(self.folder.status)

    def _ended_at(self) -> float:
        return self.status.attempts[-1].started_at + time.monotonic() - self.began

    def _judge(self) -> RunEnd:
        self._hear()
        printed = end_of(self.folder.log, _LOG_TAIL_BYTES, self.log_offset)
        said = [line.strip() for line in printed.decode(errors="replace").split("\n")]
        kills_before, kills = self._oom_kills_before, oom_kills()
        run_end = decide(
            self.spec.processes,
            self.outcomes,
            self.exits,
            self.stop,
            next((line for line in reversed(said) if line), None),
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
