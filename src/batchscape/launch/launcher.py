"""Running a sweep on this machine: the runs that are missing are started, watched and ended."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

from rich.console import Console

from batchscape.config import NoTracker, Transformers
from batchscape.errors import BatchscapeError, DiskError
from batchscape.launch.attempt import ActiveRun, Attempts
from batchscape.launch.beginnings import Branches
from batchscape.launch.child import COMMAND_WORKER, WORKER
from batchscape.launch.devices import OTHER_LAUNCHER, Lease, Presence
from batchscape.launch.failures import equal_failures, too_many_failures
from batchscape.launch.forkserver import ServerError, ServerKilledError, open_processes
from batchscape.launch.interrupts import noted_signals
from batchscape.launch.oom_knowledge import OomKnowledge
from batchscape.launch.placement import Placement
from batchscape.launch.predictions import Predictions, predict, predictions_of_equal_runs
from batchscape.launch.processes import Processes, ShouldStop
from batchscape.launch.progress import Progress
from batchscape.launch.remaining import RemainingRuns, statuses_to_retry
from batchscape.launch.result import RunResult, SweepResult
from batchscape.launch.schedule import launch_order
from batchscape.launch.scratch import scratch_folder
from batchscape.plan.machine import Machine
from batchscape.record.disk import as_disk_error, check_usable
from batchscape.record.files import write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import sweep_lock
from batchscape.record.spec import RunSpec
from batchscape.record.state import is_tried_again
from batchscape.record.status import Cause, RankExit, RunStatus, Status
from batchscape.terminal import OutgoingConsole
from batchscape.tracking.mirror import Mirror, may_mirror_live

ProcessOpener = Callable[[str, ShouldStop], Processes | None]
_POLL_S = 0.5
"""Longest time until a signal or a time limit is noticed; the end of a rank is noticed at once."""
_LOOK_S = 3.0
"""Time between looks for other launchers while runs are at work."""


class Steering(Protocol):
    """Adds runs to a launch, and cuts runs, while it is at work."""

    @property
    def runs(self) -> int:
        """Number of runs that the launch is expected to have in the end."""

    def next_runs(self, settled_run_ids: Collection[str]) -> Sequence[RunSpec]:
        """Return the next runs, none of which was returned before.

        Parameters
        ----------
        settled_run_ids : collection of str
            Names of all runs that are over or are not launched again, whatever their status.
        """

    def reason_to_cut(self, spec: RunSpec) -> str | None:
        """Return why a run at work is cut before its end; None where it goes on."""


class Launcher:
    """Runs the missing runs of a sweep; the failure of one run leaves the others alone.

    Runs that ended by a fault before are launched again only where `launcher.retry` names their
    status. Other launchers may work in the same folder at the same time: no run is done twice.

    The first SIGINT, SIGTERM or SIGHUP asks the running ranks for a checkpoint and starts no
    more runs; a second one kills the ranks. The same launch goes on from there.

    Parameters
    ----------
    sweep : SweepFolder
        Where the run folders are, or will be.
    machine : Machine
        Devices that the runs may take.
    specs : sequence of RunSpec
        Each run once, all with the same launcher and tracker settings.
    entry : str
        Entry point of every rank of our own loop, `module:function` of a run folder and a rank.
    method : str, optional
        `fork` or `spawn`; by default processes are forked where that is safe.
    console : Console, optional
        Where progress is shown; by default the standard output.
    command : str, optional
        As `record.commands.command_of` returns it; it is recorded with every run, and the
        commands that are printed derive from it.
    steering : Steering, optional
        Adds runs with the launcher and the type of device of the others, and cuts runs, which
        become `pruned`.
    values : mapping of str to str, optional
        Text beside the name of a run; the caller may add runs to it during the launch.
    process_opener : callable, optional
        Opens another way of starting ranks. It takes what to import ahead, and a callable that
        says whether to stop, as `open_processes` does.
    is_part : bool
        Whether this process does a part of a sweep that another one follows: it does not wait for
        runs of other launchers, and mirrors nothing.
    """

    _runs: RemainingRuns
    _processes: Processes
    _placement: Placement
    _attempts: Attempts
    _oom: OomKnowledge
    _branches: Branches

    def __init__(
        self,
        sweep: SweepFolder,
        machine: Machine,
        specs: Sequence[RunSpec],
        *,
        entry: str = WORKER,
        method: str | None = None,
        console: Console | None = None,
        command: str | None = None,
        steering: Steering | None = None,
        values: Mapping[str, str] | None = None,
        process_opener: ProcessOpener | None = None,
        is_part: bool = False,
    ) -> None:
        self._sweep, self._machine = sweep, machine
        # No run is started twice, whoever gives it twice.
        self._specs = launch_order(list({spec.run_id: spec for spec in specs}.values()))
        self._entry, self._command = entry, command
        self._steering = steering
        self._open_processes = process_opener or partial(open_processes, method=method)
        self._is_part = is_part
        total = len(self._specs) if steering is None else steering.runs
        self._progress = Progress(console or OutgoingConsole(), total, values)
        self._presence = Presence()
        self._signals: list[str] = []
        """Names of the signals that asked this launch to stop."""
        self._predictions: Predictions = {}
        self._queue: deque[RunSpec] = deque()
        self._results_at_request = -1
        self._stop_reason: str | None = None
        self._equal_failures: str | None = None
        self._retries: Counter[str] = Counter()
        self._active: dict[str, ActiveRun] = {}
        self._results: dict[str, RunResult] = {}

    def run(self) -> SweepResult:
        """Launch the missing runs, until all are over, or a signal or a failing machine stops it.

        Raises
        ------
        LaunchError
            If the folder cannot be used, or no process can be started at all.
        """
        if not self._specs:
            return SweepResult((), interrupted=False)
        config = self._specs[0].config
        check_usable(self._sweep)
        with sweep_lock(self._sweep), ExitStack() as stack:
            retry = statuses_to_retry(config.launcher.retry)
            self._runs = RemainingRuns(self._specs, self._sweep, retry, waits=not self._is_part)
            missing = self._runs.missing
            tracker = NoTracker("none") if self._is_part else config.tracker
            is_live = may_mirror_live(missing, self._machine.cpu_cores)
            mirror = Mirror(tracker, self._sweep, live=is_live)
            self._progress.runs_skipped(list(self._runs.settled.values()))
            specs_that_share = self._specs if self._entry == WORKER else ()
            self._branches = Branches(
                specs_that_share,
                self._sweep,
                lambda run_id: run_id not in self._results and run_id not in self._runs.settled,
            )
            if missing:
                stack.enter_context(self._presence)
                with noted_signals(self._signals):
                    self._launch(missing)
            if not self._is_part:
                self._branches.remove_unneeded()
        interrupted = bool(self._signals)
        with self._presence:
            note = mirror.finish(interrupted=interrupted)
        runs = self._runs.results(self._results)
        result = SweepResult(runs, interrupted, self._stop_reason, note, mirror.summary())
        self._progress.summary(result)
        return result

    def _launch(self, missing: Sequence[RunSpec]) -> None:
        """Open the processes, claims and predictions, work off the runs, and close them."""

        def should_stop() -> bool:
            return bool(self._signals)

        with ExitStack() as stack:
            are_programs = all(spec.is_program for spec in missing)
            preload = COMMAND_WORKER if are_programs else self._entry
            if any(isinstance(spec.config.model, Transformers) for spec in missing):
                preload += " batchscape.models.offline_transformers"  # slow to import
            try:
                processes = self._open_processes(preload, should_stop)
            except ServerKilledError as error:
                self._stop(f"no process can be started: {error}")
                return
            if processes is None:
                return
            self._processes = processes
            stack.callback(self._runs.release_all)
            stack.callback(processes.close)
            scratch = stack.enter_context(scratch_folder())
            if self._entry == WORKER:
                self._predictions, trouble = predict(
                    self._runs.specs,
                    missing,
                    self._sweep,
                    processes,
                    scratch,
                    should_stop=should_stop,
                )
                if trouble is not None:
                    self._progress.warn(trouble)
            self._placement = Placement(
                missing[0],
                self._machine,
                self._predictions,
                self._progress.warn,
                own_share=self._branches.own_share,
            )
            for spec in self._runs.specs:
                if (status := self._runs.statuses.get(spec.run_id)) is not None:
                    self._placement.learn(spec, status)
            self._attempts = Attempts(
                self._sweep,
                self._machine,
                processes,
                scratch,
                self._predictions,
                self._entry,
                self._command,
                self._branches,
            )
            self._oom = OomKnowledge(missing, self._sweep, self._machine, self._predictions)
            self._queue.extend(missing)
            with self._progress:
                self._work_off()

    def _work_off(self) -> None:
        """Run the queue, until it is empty or a signal stops it."""
        while True:
            goes_on = not self._stop_if_asked()
            if goes_on:
                self._queue.extend((*self._runs.due(), *self._request_runs()))
                self._start_runs()
            if not goes_on or self._stop_reason is not None:
                self._placement.close()
            if not self._active:
                if not (goes_on and (self._queue or self._runs.waits_for_others)):
                    return
                self._presence.hide()
                waiting_text = self._placement.why_waiting or self._runs.describe_waiting()
                self._progress.note_waiting(waiting_text)
            exits = self._processes.wait(_POLL_S)
            for name in self._runs.renew({rank_exit.run_id for rank_exit in exits}):
                self._give_up(name)
            # A launcher that came while a run ended has disturbed it, too.
            has_other_launchers = self._presence.has_others(0.0 if exits else _LOOK_S)
            for run in list(self._active.values()):
                if has_other_launchers:
                    run.spoil_times(OTHER_LAUNCHER)
                self._watch(run, exits)
            self._progress.update(
                list(self._active.values()),
                partial(self._placement.left_s, self._active, self._queue),
            )

    def _request_runs(self) -> list[RunSpec]:
        """Request more runs of the steering, once after each end."""
        if self._steering is None or len(self._results) == self._results_at_request:
            return []
        self._results_at_request = len(self._results)
        while specs := self._steering.next_runs({*self._results, *self._runs.settled}):
            missing = self._runs.add(specs)
            settled = self._runs.settled
            self._progress.runs_skipped([settled[s.run_id] for s in specs if s.run_id in settled])
            self._predictions |= predictions_of_equal_runs(
                missing, self._runs.specs, self._predictions
            )
            if missing:
                return missing
        return []

    def _watch(self, run: ActiveRun, exits: Iterable[RankExit]) -> None:
        """End a run whose ranks have ended; stop one that the steering cuts."""
        status = run.look(one for one in exits if one.run_id == run.spec.run_id)
        steering = self._steering if run.stop is None else None
        if status is not None:
            self._end(run, status)
        elif steering is not None and (reason := steering.reason_to_cut(run.spec)) is not None:
            run.ask_to_stop(Status.PRUNED, reason)

    def _stop(self, reason: str) -> None:
        """Start no more runs."""
        self._stop_reason = self._stop_reason or reason

    def _stop_for_the_disk(self, trouble: str) -> None:
        self._stop(f"{trouble}; make space, then the same command goes on")

    def _stop_if_asked(self) -> bool:
        """Ask all ranks to end after one signal, kill them after two.

        Return whether no more runs start.
        """
        if not self._signals:
            return self._stop_reason is not None
        reason = f"stopped by {self._signals[0]}"
        running = [run for run in self._active.values() if run.stop is None]
        if running:
            grace_s = max(run.stop_grace_s for run in running)
            self._progress.note(
                f"{reason}: waiting up to {grace_s:.0f} s for checkpoints; once more kills"
            )
        for run in self._active.values():
            run.ask_to_stop(Status.INTERRUPTED, reason)
            if len(self._signals) > 1:
                run.kill()
        return True

    def _start_runs(self) -> None:
        """Start runs while there are devices for the next one."""
        queue, waiting = self._queue, self._placement.waiting
        if waiting is not None and waiting in queue and self._runs.is_claimed_by_other(waiting):
            # Nobody waits for devices for a run that another launcher has.
            queue.remove(waiting)
        if queue and self._equal_failures is not None:
            if self._active:
                return  # how these end decides
            self._stop(self._equal_failures)
        has_slot = len(self._active) < self._specs[0].config.launcher.concurrent_runs
        ready = deque(spec for spec in queue if has_slot and self._branches.can_begin(spec))
        while self._stop_reason is None and (placed := self._placement.next(ready)) is not None:
            spec, lease = placed
            queue.remove(spec)
            run = self._try_to_begin(spec, lease)
            if run is None:
                self._placement.release(spec)
                continue
            self._active[spec.run_id] = run
            self._progress.run_started(run)

    def _try_to_begin(self, spec: RunSpec, lease: Lease) -> ActiveRun | None:
        """Begin a run; None if another launcher has it, if it is over, or if it cannot begin."""
        try:
            claim_or_result = self._runs.take(spec)
            if claim_or_result is None:
                return None
            if isinstance(claim_or_result, RunResult):
                self._oom.learn(spec)
                self._settle_unstarted(claim_or_result)
                return None
            if (refusal := self._oom.refusal(spec)) is not None:
                self._reject(spec, refusal)
                return None
            self._presence.show()
            run = self._attempts.begin(
                spec, lease, claim_or_result, has_other_launchers=self._presence.has_others()
            )
            # A server that died meanwhile was replaced by this start.
            if self._processes.note is not None:
                self._progress.warn(self._processes.note)
                self._processes.note = None
            return run
        except ServerError as error:
            self._stop(f"no process can be started any more: {error}")
            self._runs.release(spec.run_id)
        except (BatchscapeError, OSError) as error:
            self._runs.release(spec.run_id)
            cause = as_disk_error(error, self._sweep.path)
            if isinstance(cause, DiskError):
                self._stop_for_the_disk(str(cause))  # the run is as open as it was
            else:
                folder = self._sweep.run(spec.run_id)
                self._settle_unstarted(RunResult(folder, Status.FAILED, str(error)))
        return None

    def _reject(self, spec: RunSpec, reason: str) -> None:
        folder = self._sweep.run(spec.run_id)
        if spec.run_id in self._predictions:
            write_json(folder.prediction, self._predictions[spec.run_id])
        status = RunStatus(Status.REJECTED, reason=reason, cause=Cause.OUT_OF_MEMORY)
        status.write(folder.status)
        self._runs.release(spec.run_id)
        self._settle_unstarted(RunResult.of(folder, status))

    def _end(self, run: ActiveRun, status: RunStatus) -> None:
        """Give back the devices of a run that has ended; settle it, unless it is tried again."""
        del self._active[run.spec.run_id]
        if not self._active:
            # Before the devices are free: who takes them would find this launcher at work.
            self._presence.hide()
        self._placement.release(run.spec)
        self._placement.learn(run.spec, status)
        if status.cause is Cause.DISK:
            self._stop_for_the_disk(str(status.reason))
        goes_on = not self._signals and self._stop_reason is None
        if goes_on and self._retry(run, status):
            return
        self._runs.release(run.spec.run_id, is_over=status.status.is_sealed)
        self._oom.learn(run.spec)
        result = RunResult.of(run.folder, status)
        self._settle(result)
        self._progress.run_ended(
            run.spec, status, result.untimed_reason, time.monotonic() - run.began_at
        )

    def _give_up(self, run_id: str) -> None:
        """Settle a run that another launcher has taken over, as this one was cut off."""
        reason = "another launcher took it over, as this one was silent for too long"
        run = self._active.pop(run_id, None)
        if run is not None:
            run.kill()
            run.hangs.close()
            self._placement.release(run.spec)
        folder = self._sweep.run(run_id)
        self._settle_unstarted(RunResult(folder, Status.INTERRUPTED, reason, by_another=True))

    def _settle_unstarted(self, result: RunResult) -> None:
        """Settle a run that does not begin here, or not to its end."""
        self._settle(result)
        self._progress.run_settled(result)

    def _retry(self, run: ActiveRun, status: RunStatus) -> bool:
        """Queue a run again, with its claim, if the machine may have ended it; return if it was."""
        run_id, max_retries = run.spec.run_id, run.spec.config.launcher.retries
        if not is_tried_again(status, max_retries - self._retries[run_id]):
            return False
        self._retries[run_id] += 1
        opened = status.opened_again(f"retry {self._retries[run_id]} of {max_retries} follows")
        try:
            # With this status the same command goes on even if this launcher dies. If it cannot be
            # written, the run is not retried.
            opened.write(run.folder.status)
        except OSError:
            return False
        self._progress.run_retried(run_id, str(opened.reason))
        self._queue.append(run.spec)
        return True

    def _settle(self, result: RunResult) -> None:
        """Note how a run ended, and whether the ends so far stop the launch."""
        self._results[result.run_id] = result
        results, max_failures = self._results.values(), self._specs[0].config.launcher.max_failures
        if max_failures is None:
            self._equal_failures = equal_failures(results, self._sweep)
        elif (reason := too_many_failures(results, max_failures)) is not None:
            self._stop(reason)
