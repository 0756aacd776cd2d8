"""The runs of one launch, from the first start to the last end."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from batchscape.config import Command
from batchscape.errors import BatchscapeError, DiskError
from batchscape.launch.active import ActiveRun
from batchscape.launch.begin import begin
from batchscape.launch.child import COMMAND_WORKER, WORKER_ENVIRONMENT
from batchscape.launch.claims import ClaimedRuns
from batchscape.launch.devices import Lease
from batchscape.launch.forked import ServerError
from batchscape.launch.interrupts import Interrupts
from batchscape.launch.launch_record import OTHER_LAUNCHER, launch_record
from batchscape.launch.oom_knowledge import OomKnowledge, reject
from batchscape.launch.placement import Placement
from batchscape.launch.presence import Presence
from batchscape.launch.processes import Processes
from batchscape.launch.progress import Progress
from batchscape.launch.result import RunResult
from batchscape.record.causes import Cause
from batchscape.record.claims import RunClaim
from batchscape.record.disk import explained
from batchscape.record.environment import environment
from batchscape.record.files import write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.outcome import RankExit
from batchscape.record.progress import remaining_s
from batchscape.record.spec import RunSpec
from batchscape.record.state import is_tried_again
from batchscape.record.status import FAULTS, RunStatus, Status
from batchscape.text import count_text

if TYPE_CHECKING:
    from batchscape.plan.machine import Machine

__all__ = ["Session", "Steering"]


class Steering(Protocol):
    """Decides on the way what else is launched, and what is cut."""

    @property
    def runs(self) -> int:
        """Runs that there will be in all, as far as can be said."""

    def more(self, over: Collection[str]) -> Sequence[RunSpec]:
        """Return the runs that come next, none of which was returned before.

        Parameters
        ----------
        over : collection of str
            Names of all runs that are over, or are not launched again, whatever they came to.
        """

    def cut(self, spec: RunSpec) -> str | None:
        """Return why a run at work is cut before its end; None: it goes on."""


_ALIKE = 3
"""Runs that fail alike before any ends otherwise: the next ones would, too."""
_NUMBER = re.compile(r"(?<!code )\b\d+(?:\.\d+)?(?:e[+-]?\d+)?")
"""A number in a reason that may differ between runs that fail alike: not an exit code."""
_TRAINED = {Status.COMPLETED, Status.DIVERGED, Status.PRUNED}
"""How runs end whose program works."""
_POLL_S = 0.5
"""Longest time that a signal or a time limit waits to be seen; ends of ranks are seen at once."""
_LOOK_S = 3.0
"""Time between looks for other launchers while runs are timed."""
_FORESEE_S, _FORESEE_SHARE = 5.0, 0.002
"""Least time between two looks ahead while the same runs are at work, and the share of the time
that looking may take."""


class _Foreseen(NamedTuple):
    """When the last run should end."""

    state: object
    """The runs that were at work, and how many were done."""
    end: float
    """By the monotonic clock; NaN where it is not known."""
    until: float
    """When it is looked at again, by the same clock."""


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
    claims : ClaimedRuns
        Other launchers may be at work on the same runs.
    placement : Placement
        Decides what starts next, and where; closed by the caller.
    entry : str
        What the ranks call.
    scratch : Path
        Empty folder on this machine for the meeting points of ranks.
    max_failures : int or None
        Once so many runs have ended by a fault, no more are started.
    predictions : mapping of str to mapping
        What `prediction.json` of a run is to hold, by run.
    command : str, optional
        What asked for these runs, recorded with each.
    steering : Steering, optional
        Asked of the runs at work all the time, and for more of them by `more`.
    more : callable, optional
        Returns what is to be launched besides, given the names of the runs that are over.
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
        claims: ClaimedRuns,
        placement: Placement,
        entry: str,
        scratch: Path,
        max_failures: int | None,
        predictions: Mapping[str, Mapping[str, Any]],
        command: str | None = None,
        steering: Steering | None = None,
        more: Callable[[Collection[str]], list[RunSpec]] | None = None,
    ) -> None:
        self._steering, self._more = steering, more
        self._asked_at = -1
        self._sweep = sweep
        self._machine = machine
        self._processes = processes
        self._progress = progress
        self._interrupts = interrupts
        self._presence = presence
        self._claims = claims
        self._placement = placement
        self._entry = entry
        self._scratch = scratch
        self._max_failures = max_failures
        self._failures = 0
        self.stopped: str | None = None
        """Why no more runs are started, where no signal is the reason: the first that there was."""
        self._predictions = predictions
        self._command = command
        self._environment = environment({**os.environ, **WORKER_ENVIRONMENT}, machine.cpu_cores)
        self._retried: Counter[str] = Counter()
        self._again: list[RunSpec] = []
        self._active: dict[str, ActiveRun] = {}
        self._done: dict[str, RunResult] = {}
        self._failed: dict[str, RunSpec] = {}
        self._judged_at, self._alike = 0, ""
        self._foreseen = _Foreseen(None, math.nan, -math.inf)

    def run(self, queue: deque[RunSpec]) -> dict[str, RunResult]:
        """Run what is queued, until it is done or a signal stops it."""
        self._oom = OomKnowledge(queue, self._sweep, self._machine, self._predictions)
        while True:
            goes_on = not self._must_stop()
            if goes_on:
                queue.extend(self._claims.due())
                queue.extend(self._again)
                self._again.clear()
                queue.extend(self._next())
                self._start_what_fits(queue)
            else:
                self._placement.close()
            if not self._active:
                if not (goes_on and (queue or self._claims.has_elsewhere)):
                    return self._done
                self._presence.hide()
                waits = self._placement.waits or self._claims.describe_elsewhere()
                if self._placement.has_given_up:
                    self._stop(f"given up: {waits}")
                self._progress.waits(waits)
            exits = self._processes.wait(_POLL_S)
            for name in self._claims.renew({ended.run for ended in exits}):
                self._lose(name)
            # Whoever came while a run ended has disturbed it, too.
            others = self._presence.others(0.0 if exits else _LOOK_S)
            for run in list(self._active.values()):
                if others:
                    run.spoil_times(OTHER_LAUNCHER)
                self._look(run, exits)
            self._progress.update(list(self._active.values()), partial(self._left_s, queue))

    def _next(self) -> list[RunSpec]:
        """Ask for more runs, once after each end."""
        if self._more is None or len(self._done) == self._asked_at:
            return []
        self._asked_at = len(self._done)
        return self._more(self._done)

    def _look(self, run: ActiveRun, exits: Iterable[RankExit]) -> None:
        """Note how a run stands; end it where a rule cuts it."""
        status = run.look(ended for ended in exits if ended.run == run.spec.run_id)
        if status is not None:
            self._end(run, status)
        elif self._steering is not None and run.stop is None:
            reason = self._steering.cut(run.spec)
            if reason is not None:
                run.ask_to_stop(Status.PRUNED, reason)

    def _left_s(self, queue: Iterable[RunSpec]) -> float:
        """Return the time until the last run ends; NaN where it is not known."""
        now, state = time.monotonic(), (len(self._done), tuple(self._active))
        if self._foreseen.state == state and now < self._foreseen.until:
            foreseen_s = self._foreseen.end - now
            return foreseen_s if math.isnan(foreseen_s) else max(0.0, foreseen_s)
        at_work = []
        for run in self._active.values():
            left_s = remaining_s(run.last_row, run.spec.optimizer_steps)
            if left_s is None:
                expected_s = self._placement.expected_s(run.spec)
                elapsed_s = now - run.began
                left_s = math.nan if expected_s is None else max(0.0, expected_s - elapsed_s)
            at_work.append((run.spec, left_s))
        left_s = self._placement.left_s(at_work, queue)
        # A long queue takes time to simulate, and what is timed has the core.
        until = now + max(_FORESEE_S, (time.monotonic() - now) / _FORESEE_SHARE)
        self._foreseen = _Foreseen(state, now + left_s, until)
        return left_s

    def _stop(self, reason: str) -> None:
        """Start no more runs."""
        self.stopped = self.stopped or reason

    def _stop_for_the_disk(self, trouble: str) -> None:
        self._stop(f"{trouble}; make space, then the same command goes on")

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
        """Start what there are devices for."""
        waiting = self._placement.waiting
        if waiting is not None and waiting in queue and self._claims.is_elsewhere(waiting):
            # Nobody waits for devices for a run that another launcher has.
            queue.remove(waiting)
        if queue and (alike := self._why_all_fail(queue)):
            if self._active:
                return  # how these end decides
            self._stop(alike)
        while self.stopped is None and (placed := self._placement.next(queue)) is not None:
            spec, lease = placed
            run = self._begun(spec, lease)
            if run is None:
                self._placement.release(spec)
                continue
            self._active[spec.run_id] = run
            self._progress.run_started(run)

    def _why_all_fail(self, queue: Iterable[RunSpec]) -> str:
        """Say why the next runs would fail as all did so far; empty where they may not."""
        if self._judged_at != len(self._done):
            self._judged_at = len(self._done)
            self._alike = self._failed_alike(queue)
        return self._alike

    def _failed_alike(self, queue: Iterable[RunSpec]) -> str:
        ended = [run for run in self._done.values() if run.status is not Status.REJECTED]
        reasons = {
            _NUMBER.sub("", str(run.reason).replace(run.run_id, ""))
            for run in ended
            if run.run_id in self._failed
        }
        if (
            self._max_failures is not None
            or len(self._failed) < _ALIKE
            or len(reasons) > 1
            or any(run.status is not Status.FAILED for run in ended)
            or self._has_trained_before()
        ):
            return ""
        # What they have in common may be why they fail.
        shared = set.intersection(*map(_settings, self._failed.values()))
        if not all(shared <= _settings(spec) for spec in queue):
            return ""
        return (
            f"all {len(self._failed)} runs failed alike ({ended[0].reason}); --retry failed runs "
            "these again, and launcher.max_failures=1000 stops for a thousand failures alone"
        )

    def _has_trained_before(self) -> bool:
        """Tell whether a run of the folder has ever trained, whoever launched it."""
        for folder in self._sweep.run_folders():
            with contextlib.suppress(BatchscapeError, OSError):
                if RunStatus.read(folder.status).status in _TRAINED:
                    return True
        return False

    def _begun(self, spec: RunSpec, lease: Lease) -> ActiveRun | None:
        """Begin a run; None if another launcher has it, if it is over, or if it cannot begin."""
        try:
            claim = self._claims.take(spec)
            if claim is not None and not isinstance(claim, RunResult):
                refusal = self._oom.refusal(spec)
                if refusal is None:
                    return self._begin(spec, lease, claim)
                self._reject(spec, refusal)
                return None
        except ServerError as error:
            self._stop(f"no process can be started any more: {error}")
            self._claims.release(spec.run_id, Status.PENDING)
            return None
        except (BatchscapeError, OSError) as error:
            self._claims.release(spec.run_id, Status.FAILED)
            told = explained(error, self._sweep.path)
            if isinstance(told, DiskError):
                self._stop_for_the_disk(str(told))  # the run is as open as it was
            else:
                self._refuse(spec, error)
            return None
        if claim is not None:
            self._oom.ended(spec)
            self._settle(claim)
            self._progress.run_settled(claim)
        return None

    def _begin(self, spec: RunSpec, lease: Lease, claim: RunClaim) -> ActiveRun:
        cuda = {device.index: device for device in self._machine.cuda_devices}
        leased = [cuda[index] for index in lease.devices] if spec.device_type == "cuda" else []
        self._presence.show()
        others = self._presence.others()
        is_command = isinstance(spec.config.engine, Command)
        run = begin(
            spec,
            self._sweep.run(spec.run_id),
            lease,
            self._processes,
            entry=COMMAND_WORKER if is_command else self._entry,
            launch={
                **launch_record(spec, lease, self._machine, others=others),
                "start_method": self._processes.method,
                "command": self._command,
                "rendezvous": str(self._scratch / spec.run_id),
                **self._processes.place(),
            },
            environment=self._environment,
            prediction=self._predictions.get(spec.run_id),
            # By UUID: the numbers of NVML and of CUDA may differ.
            variables={"CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in leased)},
            keep_open=(*claim.descriptors, *lease.locks),
        )
        # A server that died meanwhile was replaced by this start.
        if self._processes.note is not None:
            self._progress.warn(self._processes.note)
            self._processes.note = None
        return run

    def _reject(self, spec: RunSpec, reason: str) -> None:
        folder = self._sweep.run(spec.run_id)
        if (prediction := self._predictions.get(spec.run_id)) is not None:
            write_json(folder.prediction, dict(prediction))
        status = reject(folder, reason)
        self._claims.release(spec.run_id, status.status)
        result = RunResult.of(folder, status)
        self._settle(result)
        self._progress.run_refused(result)

    def _end(self, run: ActiveRun, status: RunStatus) -> None:
        """Give back what a run had that has ended, and tell of it, unless it is tried again."""
        del self._active[run.spec.run_id]
        if not self._active:
            # Before anybody can take the devices: it would take us for at work beside it.
            self._presence.hide()
        self._placement.release(run.spec)
        self._placement.learn(run.spec, status)
        if status.cause is Cause.DISK:
            self._stop_for_the_disk(str(status.reason))
        goes_on = not self._interrupts.count and self.stopped is None
        if goes_on and self._is_retried(run, status):
            return
        self._claims.release(run.spec.run_id, status.status)
        self._oom.ended(run.spec)
        if status.status is Status.FAILED:
            self._failed[run.spec.run_id] = run.spec
        self._settle(RunResult.of(run.folder, status))
        self._progress.run_ended(run, status)

    def _lose(self, run_id: str) -> None:
        """End a run that another launcher has taken over, as this one was cut off."""
        reason = "taken over by another launcher, which did not see this one any more"
        run = self._active.pop(run_id, None)
        self._again = [spec for spec in self._again if spec.run_id != run_id]
        if run is not None:
            run.kill()
            run.hangs.close()
            self._placement.release(run.spec)
        log = self._sweep.run(run_id).log
        result = RunResult(run_id, Status.INTERRUPTED, reason, log, by_another=True)
        self._settle(result)
        self._progress.run_refused(result)

    def _is_retried(self, run: ActiveRun, status: RunStatus) -> bool:
        """Put a run into the queue again that the machine may have ended; it stays claimed."""
        run_id, most = run.spec.run_id, run.spec.config.launcher.retries
        if not is_tried_again(status, most - self._retried[run_id]):
            return False
        self._retried[run_id] += 1
        reason = f"retry {self._retried[run_id]} of {most} follows: {status.reason}"
        try:
            # Whatever becomes of this launcher, the same command goes on with the run. Where that
            # cannot be written there is no retry, and the run stands as it ended.
            open_again = replace(status, status=Status.INTERRUPTED, reason=reason)
            open_again.write(run.folder.status)
        except OSError:
            return False
        self._progress.run_retried(run_id, reason)
        self._again.append(run.spec)
        return True

    def _refuse(self, spec: RunSpec, error: BatchscapeError | OSError) -> None:
        log = self._sweep.run(spec.run_id).log
        result = RunResult(spec.run_id, Status.FAILED, str(error), log)
        self._settle(result)
        self._progress.run_refused(result)

    def _settle(self, result: RunResult) -> None:
        self._done[result.run_id] = result
        self._failures += result.status in FAULTS and not result.by_another
        if self._max_failures is not None and self._failures >= self._max_failures:
            count = count_text(self._failures, "run has", "runs have")
            self._stop(f"{count} failed, and launcher.max_failures is {self._max_failures}")


def _settings(spec: RunSpec) -> set[str]:
    """Return the settings of a run, as texts; a seed is none that makes it fail."""
    return {
        f"{group}.{name}={value!r}"
        for group, values in spec.config.to_mapping().items()
        if isinstance(values, Mapping)
        for name, value in values.items()
    }
