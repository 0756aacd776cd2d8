"""One attempt at a run: its ranks are started and watched, and their end is written."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from batchscape.errors import DiskError, LaunchError, RecordError
from batchscape.launch.beginnings import Branches
from batchscape.launch.child import COMMAND_WORKER, WORKER_ENVIRONMENT, Start, last_line
from batchscape.launch.devices import LaunchRecord, Lease, launch_record
from batchscape.launch.forkserver import ServerError
from batchscape.launch.hangs import HangWatch
from batchscape.launch.predictions import Predictions
from batchscape.launch.processes import Processes
from batchscape.measure.oom_kills import oom_kills
from batchscape.plan.machine import Machine
from batchscape.record.claims import RunClaim
from batchscape.record.disk import disk_error, disk_trouble
from batchscape.record.environment import environment
from batchscape.record.files import last_row, read_json, write_json
from batchscape.record.folder import TABLES, RunFolder, SweepFolder
from batchscape.record.instants import now
from batchscape.record.spec import RunSpec
from batchscape.record.state import LOST, RunState, decide, read_state
from batchscape.record.status import (
    Attempt,
    Cause,
    Outcome,
    RankExit,
    RunEnd,
    RunStatus,
    Status,
    Stop,
)
from batchscape.record.tables import note_rows, remove_dead_writes, seal
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


@dataclass
class ActiveRun:
    """A run whose ranks have been started."""

    spec: RunSpec
    folder: RunFolder
    status: RunStatus
    processes: Processes
    log_offset: int
    """Size of the log before this attempt."""
    hangs: HangWatch
    """Closed at the end."""
    began_at: float = field(default_factory=time.monotonic)
    """On the monotonic clock."""
    exits: dict[int, RankExit] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """Outcomes that ranks have written so far."""
    stop: Stop | None = None
    killed_at: float | None = None
    """When this launcher killed the ranks, in seconds since the epoch."""
    _stacks_at: float = math.inf
    """When the ranks of a run that hangs will have written their stacks."""
    _oom_kills_before: int | None = field(default_factory=oom_kills)
    _kill_at: float = math.inf
    _end_due_at: float = math.inf
    """When the last rank has to be at its end, as another one is there."""
    _spoil_reason: str | None = None

    @property
    def last_row(self) -> dict[str, Any]:
        """Latest row of optimizer steps; empty where no row can be read."""
        with suppress(RecordError):
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
        self._kill_at = math.inf
        self.killed_at = self.killed_at or now()
        self.processes.signal(self.spec.run_id, signal.SIGKILL)

    def spoil_times(self, reason: str) -> None:
        """Keep the times of this run out of comparisons."""
        if self._spoil_reason is None:
            self._spoil_reason = reason
            # Now, for the case that this launcher is killed; else `_conclude` writes it last.
            with suppress(OSError):
                self._write_spoiled(reason)

    def _write_spoiled(self, reason: str) -> None:
        with suppress(RecordError):  # a damaged record tells no valid times either
            launch = read_json(self.folder.launch)
            invalidate_times(launch, reason)
            write_json(self.folder.launch, launch)

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
        with suppress(RecordError):  # the end of the run reports the damage
            self._read_outcomes()
        for rank_exit in exits:
            self.exits[rank_exit.rank] = rank_exit
            if len(self.exits) < self.spec.processes and self.stop is None:
                self._note_end_of(rank_exit.rank)
        at = time.monotonic()
        self._enforce_limits(at)
        self._watch_for_hang(at)
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
        else:
            # Also after a crash in the teardown, which costs the training nothing.
            self._end_due_at = min(self._end_due_at, time.monotonic() + END_GRACE_S)

    def _enforce_limits(self, at: float) -> None:
        timeout_s = self.spec.config.launcher.timeout_s
        if timeout_s is not None and at - self.began_at > timeout_s:
            self.ask_to_stop(Status.TIMEOUT, f"not done after timeout_s = {timeout_s:g} s")
        is_asked_to_end = self.stop is not None or self._kill_at < math.inf
        if len(self.outcomes) == self.spec.processes:
            self._kill_within(PEER_GRACE_S)
        elif at > self._end_due_at and not is_asked_to_end:
            late_ranks = sorted(set(range(self.spec.processes)) - set(self.exits))
            reason = f"ranks {late_ranks} hang: others ended {END_GRACE_S:g} s ago"
            self.stop = Stop(Status.FAILED, reason=reason, cause=Cause.HANG)
            self.kill()
        if at >= self._kill_at:
            self.kill()

    def _watch_for_hang(self, at: float) -> None:
        """End a run that hangs: ask all ranks for their stacks, then for their end."""
        if at >= self._stacks_at:
            self._keep_stacks()
            self.processes.signal(self.spec.run_id, signal.SIGTERM)
            # The watcher of a program has to end the program first.
            self._kill_within(self.stop_grace_s if self.spec.is_program else PEER_GRACE_S)
        elif self.stop is None and not self.exits and (hang := self.hangs.look(at)) is not None:
            self.stop, self._stacks_at = hang, at
            if not self.spec.is_program:
                self._stacks_at += STACKS_GRACE_S
                self.processes.signal(self.spec.run_id, signal.SIGUSR1)

    def _keep_stacks(self) -> None:
        self._stacks_at = math.inf
        self.hangs.write_stacks(self.folder.log)

    def _kill_within(self, grace_s: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    def _conclude(self) -> RunStatus:
        """Write how the run ended: sealed if that is final, else open for the next attempt."""
        # Rows that cannot be read, or a disk that is full, end this run, not the sweep.
        if self._stacks_at < math.inf:
            self._keep_stacks()
        try:
            run_end = self._decide_end()
            if self._spoil_reason is not None:
                self._write_spoiled(self._spoil_reason)
            write_end(self.spec, self.folder, self.status, run_end, self._ended_at())
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
        with suppress(OSError):
            self.status.write(self.folder.status)

    def _ended_at(self) -> float:
        return self.status.attempts[-1].started_at + time.monotonic() - self.began_at

    def _decide_end(self) -> RunEnd:
        self._read_outcomes()
        kills_before, kills = self._oom_kills_before, oom_kills()
        run_end = decide(
            self.spec.processes,
            self.outcomes,
            self.exits,
            self.stop,
            last_line(self.folder.log, self.log_offset),
            killed_at=self.killed_at,
            oom_kills=0 if kills_before is None or kills is None else kills - kills_before,
            device_type=self.spec.device_type,
        )
        if run_end.rank is not None and run_end.phase is None:
            run_end = replace(run_end, phase=self.hangs.last_phase(run_end.rank))
        # A rank that meets a full disk cannot say so: neither its outcome nor its log is taken.
        is_silent_end = run_end.cause is Cause.EXCEPTION and run_end.rank not in self.outcomes
        if is_silent_end and (trouble := disk_trouble(self.folder.path)) is not None:
            return replace(run_end, status=Status.INTERRUPTED, reason=trouble, cause=Cause.DISK)
        return run_end


def write_end(
    spec: RunSpec, folder: RunFolder, status: RunStatus, run_end: RunEnd, ended_at: float
) -> None:
    """Write how the last attempt at a run ended: sealed if that is final, else left open.

    Parameters
    ----------
    spec : RunSpec
        Of a run that the caller has claimed.
    folder : RunFolder
    status : RunStatus
        As the folder has it; the end is filled in.
    run_end : RunEnd
    ended_at : float
        In seconds since the epoch.

    Raises
    ------
    RecordError
        If the rows are damaged.
    OSError
        If it cannot be written.
    """
    status.note_end(run_end, ended_at)
    if status.status.is_sealed:
        seal(folder, status, spec.geometry.data_parallel_size)
    else:
        note_rows(folder, status, spec.geometry.data_parallel_size)
        status.write(folder.status)


def _add_earlier_times(
    earlier_launch: LaunchRecord,
    launch: LaunchRecord,
    prefix: str = "an earlier attempt: ",
) -> None:
    """Add the reasons of the earlier launch to the record: the rows are those of all attempts."""
    earlier_cores, cores = earlier_launch.get("usable_cores"), launch["usable_cores"]
    if earlier_cores != cores:
        reason = f"usable cores changed from {earlier_cores} to {cores} between attempts"
        invalidate_times(launch, reason)
    if not earlier_launch.get("timing_valid"):
        earlier_reasons = str(earlier_launch.get("timing_invalid_reason") or "no reason recorded")
        present_reasons = str(launch["timing_invalid_reason"]).split("; ")
        for reason in earlier_reasons.split("; "):
            if reason.removeprefix(prefix) not in present_reasons:
                invalidate_times(launch, prefix + reason.removeprefix(prefix))


@dataclass(frozen=True)
class Attempts:
    """Starts the attempts of one launch."""

    sweep: SweepFolder
    machine: Machine
    processes: Processes
    scratch: Path
    """Folder on this machine for the meeting points of ranks."""
    predictions: Predictions
    """Only a first attempt writes that of its run."""
    entry: str
    """Entry point of the ranks of our own loop."""
    command: str | None
    """The command of the launch, recorded with each run."""
    branches: Branches

    def __post_init__(self) -> None:
        _ = self._environment  # of the code that ranks import, not of what is there hours later

    @cached_property
    def _environment(self) -> dict[str, Any]:
        return environment({**os.environ, **WORKER_ENVIRONMENT}, self.machine.cpu_cores)

    def begin(
        self, spec: RunSpec, lease: Lease, claim: RunClaim, *, has_other_launchers: bool
    ) -> ActiveRun:
        """Prepare the folder of a run for its next attempt, and start the ranks.

        Parameters
        ----------
        spec : RunSpec
            Of a run that is not sealed.
        lease : Lease
        claim : RunClaim
            The ranks inherit it and the locks of the devices, which last as long as the ranks.
        has_other_launchers : bool
            Whether others are at work on this machine.

        Raises
        ------
        RecordError
            If the folder is damaged.
        LaunchError
            If the run has a checkpoint from a device of another model, or no process can be
            started.
        ServerError or DiskError
            If no run can be started at all; the folder is then as it was.
        OSError
            If the folder cannot be written to.
        """
        folder = self.sweep.run(spec.run_id)
        state = read_state(folder, spec, is_ours=True)
        launch = self._launch_record(spec, state, lease, has_other_launchers=has_other_launchers)
        # Ranks meet where no earlier attempt has left files.
        meeting_prefix = launch["rendezvous"]
        try:
            hangs = HangWatch(meeting_prefix, spec)
        except OSError as error:
            # The disk of temporary files may be full while that of the sweep is not.
            raise disk_error(error, Path(meeting_prefix)) from error
        # By UUID: the numbers of NVML and of CUDA may differ.
        uuid_by_index = {device.index: device.uuid for device in self.machine.cuda_devices}
        uuids = [uuid_by_index[i] for i in lease.devices] if spec.device_type == "cuda" else []
        start = Start(
            run_id=spec.run_id,
            run_dir=str(folder.path.absolute()),
            log=str(folder.log.absolute()),
            ranks=spec.processes,
            entry=COMMAND_WORKER if spec.is_program else self.entry,
            environment={"CUDA_VISIBLE_DEVICES": ",".join(uuids)},
            heartbeat_prefix=meeting_prefix,
        )
        with ExitStack() as cleanup:
            cleanup.callback(hangs.close)
            status = self._write_start(spec, state, launch)
            log_offset = folder.log.stat().st_size if folder.log.exists() else 0
            active = ActiveRun(spec, folder, status, self.processes, log_offset, hangs)
            try:
                self.processes.start(start, (*claim.descriptors, *lease.locks))
            except ServerError:
                # The server is at fault and not this run, whose turn will come.
                state.record.write(folder.status)
                raise
            except LaunchError as error:
                active.abandon(str(error))
                raise
            cleanup.pop_all()
        return active

    def _launch_record(
        self, spec: RunSpec, state: RunState, lease: Lease, *, has_other_launchers: bool
    ) -> LaunchRecord:
        """Describe an attempt, and whether the times of all attempts so far can be compared."""
        folder, attempt = state.folder, len(state.record.attempts)
        launch = {
            "attempt": attempt,
            **launch_record(spec, lease, self.machine, has_other_launchers=has_other_launchers),
            "start_method": self.processes.method,
            "command": self.command,
            "rendezvous": str(self.scratch / f"{spec.run_id}-{attempt}"),
            **self.processes.node_entries(),
            **self.branches.launch_record(spec),
        }
        if state.goes_on:
            earlier_launch = read_json(folder.launch)
            if (model := earlier_launch.get("device_model")) != launch["device_model"]:
                # Times of two device models cannot be joined.
                raise LaunchError(
                    f"it was begun on {model} and cannot go on here, on {launch['device_model']}; "
                    f"delete {folder.path} to begin again"
                )
            _add_earlier_times(earlier_launch, launch)
            launch.pop("begins", None)
            return launch | {key: earlier_launch[key] for key in earlier_launch if key == "begins"}
        # An attempt that begins anew may be on another device; it keeps its own states.
        shutil.rmtree(folder.branches, ignore_errors=True)
        if "begins" in launch:
            earlier_launch = read_json(folder.beginning / folder.launch.name)
            if earlier_launch.get("device_model") == launch["device_model"]:
                _add_earlier_times(earlier_launch, launch, "the run that it began as: ")
                return launch
            del launch["begins"]
            shutil.rmtree(folder.beginning, ignore_errors=True)
        return launch

    def _write_start(self, spec: RunSpec, state: RunState, launch: LaunchRecord) -> RunStatus:
        """Write the files of an attempt that begins into the folder of a run; return its status."""
        folder, earlier_status = state.folder, deepcopy(state.record)
        if state.is_lost and earlier_status.attempts:
            earlier_status.note_end(LOST, state.lost_at)
        attempts = earlier_status.attempts
        remove_dead_writes(folder)
        for leftover in (*folder.outcomes(), *map(folder.parquet, TABLES)):
            # Parquet without a seal is from a launcher that died while sealing; the lines remain.
            leftover.unlink(missing_ok=True)
        spec.write(folder.config)
        write_json(folder.environment, self._environment)
        if spec.run_id in self.predictions and not attempts:
            write_json(folder.prediction, self.predictions[spec.run_id])
        write_json(folder.launch, launch)
        begins_again = spec.is_program and not spec.is_resumable_program
        if begins_again and attempts and folder.log.exists():
            # A program that begins again begins a new log: its losses may be read from the log.
            folder.log.rename(folder.log.with_name(f"log-{len(attempts) - 1}.txt"))
        # An attempt begins after the earlier ones, whatever the clock says.
        began_at = max([now(), *(attempt.ended_at or attempt.started_at for attempt in attempts)])
        attempts.append(Attempt(began_at, 0))
        status = RunStatus(Status.RUNNING, attempts=attempts, summary=earlier_status.summary)
        status.write(folder.status)
        return status
