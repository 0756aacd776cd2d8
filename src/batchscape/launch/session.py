"""The runs of one launch, from the first start to the last end."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from batchscape.config import Command
from batchscape.errors import BatchscapeError, LaunchError
from batchscape.launch.active import ActiveRun
from batchscape.launch.begin import begin
from batchscape.launch.child import COMMAND_WORKER, WORKER_ENVIRONMENT
from batchscape.launch.claims import Claims
from batchscape.launch.interrupts import Interrupts
from batchscape.launch.launch_record import OTHER_LAUNCHER, launch_record
from batchscape.launch.oom_knowledge import OomKnowledge, reject
from batchscape.launch.pool import DevicePool, Lease
from batchscape.launch.presence import Presence
from batchscape.launch.processes import Processes
from batchscape.launch.progress import Progress
from batchscape.launch.result import FAULTS, RunResult
from batchscape.record.environment import environment
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import Lock
from batchscape.record.spec import RunSpec
from batchscape.record.status import Status

if TYPE_CHECKING:
    from batchscape.plan.machine import Machine

__all__ = ["Session"]

_POLL_S = 0.5
"""Longest time that a signal or a time limit waits to be seen; ends of ranks are seen at once."""
_LOOK_S = 3.0
"""Time between looks for other launchers while runs are timed."""


class Session:
    """Leases devices, starts runs, watches them, and notes how they ended.

    Parameters
    ----------
    sweep : SweepFolder
    machine : Machine
    processes : Processes
        Closed by the caller.
    progress : Progress
        Told of everything.
    interrupts : Interrupts
        Looked at all the time.
    presence : Presence
        Asked for other launchers: with one beside it, a run's times are not its own.
    claims : Claims
        Other launchers may be at work on the same runs.
    target : str
        What the ranks call.
    scratch : Path
        Empty folder on this machine for the meeting points of ranks.
    max_failures : int or None
        Once so many runs have ended by a fault, no more are started.
    """

    def __init__(
        self,
        *,
        sweep: SweepFolder,
        machine: Machine,
        processes: Processes,
        progress: Progress,
        interrupts: Interrupts,
        presence: Presence,
        claims: Claims,
        target: str,
        scratch: Path,
        max_failures: int | None,
    ) -> None:
        self._sweep = sweep
        self._machine = machine
        self._processes = processes
        self._progress = progress
        self._interrupts = interrupts
        self._presence = presence
        self._claims = claims
        self._target = target
        self._scratch = scratch
        self._max_failures = max_failures
        self._environment = environment({**os.environ, **WORKER_ENVIRONMENT}, machine.cpu_cores)
        self._pools = {
            "cpu": DevicePool(range(machine.cpu_cores)),
            "cuda": DevicePool(device.index for device in machine.cuda_devices),
        }
        self._active: dict[str, ActiveRun] = {}
        self._done: dict[str, RunResult] = {}

    def run(self, queue: deque[RunSpec]) -> dict[str, RunResult]:
        """Run what is queued, until it is done or a signal stops it."""
        self._oom = OomKnowledge(queue, self._sweep, self._machine)
        queue = deque(self._oom.first_the_witnesses(queue))
        while True:
            goes_on = not self._must_stop()
            if goes_on:
                queue.extend(self._claims.due())
                self._start_what_fits(queue)
            if not self._active:
                if not (goes_on and (queue or self._claims.has_elsewhere)):
                    return self._done
                self._progress.waits(self._claims.describe_elsewhere())
            for ended in self._processes.wait(_POLL_S):
                self._active[ended.run].note(ended)
            others = self._presence.others(_LOOK_S)
            for run in list(self._active.values()):
                if others:
                    run.spoil_times(OTHER_LAUNCHER)
                run.watch()
                if run.has_ended:
                    self._end(run)
            self._progress.update(list(self._active.values()))

    @property
    def stopped(self) -> str | None:
        """Why no more runs are started, where runs that failed are the reason."""
        failed = sum(result.status in FAULTS for result in self._done.values())
        if self._max_failures is None or failed < self._max_failures:
            return None
        count = "1 run has" if failed == 1 else f"{failed} runs have"
        return f"{count} failed, and launcher.max_failures is {self._max_failures}"

    def _must_stop(self) -> bool:
        count = self._interrupts.count
        if count == 0:
            return self.stopped is not None
        reason = f"stopped by {self._interrupts.first}"
        asked = [run for run in self._active.values() if run.stop is None]
        if asked:
            grace_s = max(run.stop_grace_s for run in asked)
            self._progress.note(
                f"{reason}: waiting up to {grace_s:.0f} s for checkpoints; once more kills"
            )
        for run in self._active.values():
            run.ask_to_stop(Status.INTERRUPTED, reason)
            if count > 1:
                run.kill()
        return True

    def _start_what_fits(self, queue: deque[RunSpec]) -> None:
        """Start runs in their order: a wide one is never overtaken for ever by narrow ones."""
        while queue and len(self._active) < queue[0].config.launcher.concurrent_runs:
            spec = queue[0]
            launcher = spec.config.launcher
            per_device = {
                "cpu": launcher.max_ranks_per_core,
                "cuda": launcher.max_ranks_per_device,
            }[spec.device_type]
            pool = self._pools[spec.device_type]
            try:
                lease = pool.lease(spec.geometry.data_parallel_size, per_device)
            except LaunchError as error:
                self._refuse(queue.popleft(), error)
                continue
            if lease is None:
                return
            queue.popleft()
            run = self._begun(spec, lease)
            if run is None:
                pool.release(lease)
                continue
            self._active[spec.run_id] = run
            self._progress.run_started(run)

    def _begun(self, spec: RunSpec, lease: Lease) -> ActiveRun | None:
        """Begin a run; None if another launcher has it, if it is over, or if it cannot begin."""
        try:
            claim = self._claims.take(spec)
            if isinstance(claim, Lock):
                refusal = self._oom.refusal(spec)
                if refusal is None:
                    self._oom.begun(spec)
                    return self._begin(spec, lease, claim)
                self._reject(spec, refusal)
                return None
        except (BatchscapeError, OSError) as error:
            self._claims.release(spec.run_id, Status.FAILED)
            self._refuse(spec, error)
            return None
        if claim is not None:
            self._oom.ended(spec)
            self._done[spec.run_id] = claim
            self._progress.run_settled(claim)
        return None

    def _begin(self, spec: RunSpec, lease: Lease, lock: Lock) -> ActiveRun:
        cuda = {device.index: device for device in self._machine.cuda_devices}
        leased = [cuda[index] for index in lease.devices] if spec.device_type == "cuda" else []
        others = self._presence.others()
        is_command = isinstance(spec.config.engine, Command)
        return begin(
            spec,
            self._sweep.run(spec.run_id),
            lease,
            self._processes,
            target=COMMAND_WORKER if is_command else self._target,
            launch={
                **launch_record(spec, lease, self._machine, others=others),
                "start_method": self._processes.method,
                "rendezvous": str(self._scratch / spec.run_id),
            },
            environment=self._environment,
            # By UUID: the numbers of NVML and of CUDA may differ.
            variables={"CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in leased)},
            keep_open=(lock.descriptor,),
        )

    def _reject(self, spec: RunSpec, reason: str) -> None:
        folder = self._sweep.run(spec.run_id)
        status = reject(folder, reason)
        self._claims.release(spec.run_id, status.status)
        self._done[spec.run_id] = result = RunResult.of(folder, status)
        self._progress.run_refused(result)

    def _end(self, run: ActiveRun) -> None:
        del self._active[run.spec.run_id]
        self._pools[run.spec.device_type].release(run.lease)
        if self._presence.others():
            run.spoil_times(OTHER_LAUNCHER)
        status = run.conclude()
        run_id, log = run.spec.run_id, run.folder.log
        self._claims.release(run_id, status.status)
        self._oom.ended(run.spec)
        self._done[run_id] = RunResult(run_id, status.status, status.reason, log)
        self._progress.run_ended(run, status)

    def _refuse(self, spec: RunSpec, error: BatchscapeError | OSError) -> None:
        log = self._sweep.run(spec.run_id).log
        result = RunResult(spec.run_id, Status.FAILED, str(error), log)
        self._done[spec.run_id] = result
        self._progress.run_refused(result)
