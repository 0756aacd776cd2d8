"""One attempt at one run: its folder made ready, its ranks watched, its end written down."""

from __future__ import annotations

import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchscape.errors import LaunchError, RecordError
from batchscape.launch.child import RankExit, Start
from batchscape.launch.outcome import Outcome, Stop, Verdict, decide
from batchscape.launch.pool import Lease
from batchscape.launch.processes import Processes
from batchscape.record.files import read_json, read_json_lines, write_json
from batchscape.record.folder import TABLES, RunFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import Attempt, RunStatus, Status
from batchscape.record.summary import summarise
from batchscape.record.tables import read_table, seal

__all__ = ["END_GRACE_S", "PEER_GRACE_S", "STOP_GRACE_S", "ActiveRun", "begin"]

STOP_GRACE_S = 20.0
"""Time for a checkpoint between SIGTERM and SIGKILL."""
PEER_GRACE_S = 5.0
"""Time for the other ranks once one has failed, or once all have left their outcomes: they may
wait in a collective, or for a native thread, for ever."""
END_GRACE_S = 300.0
"""Time for the other ranks once one has ended well."""

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
    began: float = field(default_factory=time.monotonic)
    """On the monotonic clock."""
    exits: dict[int, RankExit] = field(default_factory=dict)
    stop: Stop | None = None
    _kill_at: float | None = None
    _watching_end_since: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether no rank is left."""
        return len(self.exits) == self.lease.ranks

    def ask_to_stop(self, status: Status, reason: str) -> None:
        """Ask the ranks for a checkpoint and their end; they are killed if it takes too long."""
        if self.stop is None:
            self.stop = Stop(status, reason, time.time())
            self._kill_within(STOP_GRACE_S)
            self.processes.signal(self.spec.run_id, signal.SIGTERM)

    def kill(self) -> None:
        """End all ranks now."""
        self._kill_at = None
        self.processes.signal(self.spec.run_id, signal.SIGKILL)

    def note(self, ended: RankExit) -> None:
        """Take note of a rank's end."""
        self.exits[ended.rank] = ended
        if self.has_ended or self.stop is not None:
            return
        if ended.code != 0:
            self._kill_within(PEER_GRACE_S)
        elif self._watching_end_since is None:
            self._watching_end_since = time.monotonic()

    def watch(self) -> None:
        """Enforce the time limits."""
        now = time.monotonic()
        timeout_s = self.spec.config.launcher.timeout_s
        if timeout_s is not None and now - self.began > timeout_s:
            self.ask_to_stop(Status.TIMEOUT, f"not done after timeout_s = {timeout_s:g} s")
        if self._watching_end_since is not None and self._kill_at is None:
            if len(self.folder.outcomes()) == self.lease.ranks:
                self._kill_within(PEER_GRACE_S)
            elif self.stop is None and now - self._watching_end_since > END_GRACE_S:
                late = sorted(set(range(self.lease.ranks)) - set(self.exits))
                reason = f"ranks {late} hang: others ended well {END_GRACE_S:g} s ago"
                self.stop = Stop(Status.FAILED, reason, time.time())
                self.kill()
        if self._kill_at is not None and now >= self._kill_at:
            self.kill()

    def _kill_within(self, grace_s: float) -> None:
        at = time.monotonic() + grace_s
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def conclude(self) -> RunStatus:
        """Write how the run ended: sealed if that is final, else open for the next attempt."""
        try:
            self._fill_in(self._verdict())
            self._write()
        except RecordError as error:
            # Rows that cannot be read end this run, not the sweep.
            self._fill_in(Verdict(Status.FAILED, reason=f"its records are damaged: {error}"))
            self.status.write(self.folder.status)
        return self.status

    def abandon(self, reason: str) -> None:
        """Write that the ranks could not be started."""
        self._fill_in(Verdict(Status.FAILED, reason=reason))
        self.status.write(self.folder.status)

    def _write(self) -> None:
        attempts = self.status.attempts
        attempts[-1].from_optimizer_step = _went_on_from(self.folder, len(attempts) - 1)
        if self.status.status.is_sealed:
            seal(self.folder, self.status, self.lease.ranks)
            # Nothing goes on from here: what ranks left for that is in the status by now.
            shutil.rmtree(self.folder.checkpoints, ignore_errors=True)
            for outcome in self.folder.outcomes():
                outcome.unlink(missing_ok=True)
            return
        tables = {table: read_table(self.folder, table) for table in TABLES}
        self.status.summary = summarise(**tables, data_parallel_size=self.lease.ranks)
        self.status.write(self.folder.status)

    def _verdict(self) -> Verdict:
        outcomes = {
            rank: Outcome.read(self.folder.outcome(rank))
            for rank in range(self.lease.ranks)
            if self.folder.outcome(rank).exists()
        }
        last_words = _last_line(self.folder.log, self.log_offset)
        return decide(self.lease.ranks, outcomes, self.exits, self.stop, last_words)

    def _fill_in(self, verdict: Verdict) -> None:
        self.status.status = verdict.status
        self.status.stop_reason = verdict.stop_reason
        self.status.reason = verdict.reason
        self.status.rank = verdict.rank
        attempt = self.status.attempts[-1]
        attempt.ended_at = time.time()
        attempt.status = str(verdict.status)
        attempt.reason = verdict.reason


def begin(
    spec: RunSpec,
    folder: RunFolder,
    lease: Lease,
    processes: Processes,
    *,
    target: str,
    launch: dict[str, Any],
    environment: dict[str, Any],
    variables: dict[str, str],
) -> ActiveRun:
    """Make the folder ready for the next attempt, and start the ranks.

    Parameters
    ----------
    spec : RunSpec
    folder : RunFolder
        With a status that is not sealed.
    lease : Lease
    processes : Processes
    target : str
        What each rank calls.
    launch : dict
        For `launch.json`; the attempt is added.
    environment : dict
        For `environment.json`.
    variables : dict
        Environment variables of the ranks.

    Raises
    ------
    RecordError
        If the folder is damaged.
    LaunchError
        If the run has a checkpoint from a device of another model.
    """
    status = RunStatus.read(folder.status)
    _check_device_model(folder, launch)
    for leftover in (*folder.outcomes(), *map(folder.parquet, TABLES)):
        # Parquet without a seal is from a launcher that died while sealing; the lines remain.
        leftover.unlink(missing_ok=True)
    if status.attempts and status.attempts[-1].ended_at is None:
        lost = status.attempts[-1]
        lost.ended_at = status.updated_at
        lost.status, lost.reason = str(Status.INTERRUPTED), "the launcher died"
    attempt = len(status.attempts)
    spec.write(folder.config)
    write_json(folder.environment, environment)
    write_json(folder.launch, {"attempt": attempt, **launch})
    status.status, status.stop_reason, status.reason, status.rank = Status.RUNNING, None, None, None
    status.attempts.append(Attempt(started_at=time.time(), from_optimizer_step=0))
    status.write(folder.status)
    active = ActiveRun(
        spec=spec,
        folder=folder,
        status=status,
        lease=lease,
        processes=processes,
        log_offset=folder.log.stat().st_size if folder.log.exists() else 0,
    )
    start = Start(
        run=spec.run_id,
        run_dir=str(folder.path.absolute()),
        log=str(folder.log.absolute()),
        ranks=lease.ranks,
        target=target,
        environment=variables,
    )
    try:
        processes.start(start)
    except LaunchError as error:
        active.abandon(str(error))
        raise
    return active


def _check_device_model(folder: RunFolder, launch: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint of another device: the times would mean nothing."""
    if not folder.checkpoints.is_dir() or not any(folder.checkpoints.iterdir()):
        return
    before, now = read_json(folder.launch).get("device_model"), launch["device_model"]
    if before != now:
        msg = (
            f"it was begun on {before} and cannot go on here, on {now}; "
            f"delete {folder.path} to begin again"
        )
        raise LaunchError(msg)


def _went_on_from(folder: RunFolder, attempt: int) -> int:
    """Return the optimizer steps that were done before an attempt, by the rows that it kept."""
    done = 0
    for row in read_json_lines(folder.lines("steps")):
        if row["attempt"] == attempt:
            return int(row["optimizer_step"]) - 1
        done = int(row["optimizer_step"])
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
