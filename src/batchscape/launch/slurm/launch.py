"""The side of the command: jobs are submitted, followed, and cancelled.

Only the names of jobs are needed, which derive from the sweep folder: the scheduler knows which
jobs there are, so that the same command submits none twice, however the one before it ended.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from batchscape import scheduler
from batchscape.config import Slurm
from batchscape.errors import BatchscapeError, LaunchError, RecordError, SchedulerError
from batchscape.launch.attempt import write_end
from batchscape.launch.beginnings import Branches
from batchscape.launch.progress import Progress
from batchscape.launch.remaining import RemainingRuns, statuses_to_retry
from batchscape.launch.result import RunResult, SweepResult
from batchscape.launch.schedule import launch_order
from batchscape.launch.slurm.order import POOL, JobOrder, job_name, script, shapes
from batchscape.record.claims import CLAIMS
from batchscape.record.disk import check_usable, read_each
from batchscape.record.files import read_json, write_atomically
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.locks import hold, sweep_lock
from batchscape.record.spec import RunSpec
from batchscape.record.state import Next, read_state
from batchscape.record.status import Cause, RunEnd, RunStatus, Status
from batchscape.scheduler import Job, JobState, active_jobs, jobs, partitions, submit
from batchscape.text import count_text
from batchscape.tracking.mirror import Mirror

_LOOK_S = 2.0
"""Time between looks at the runs that are not over."""
_QUERY_S = 10.0
"""Time between queries to the scheduler, which serves others as well."""
_LEFT_S = 180.0
"""Time for which claims of jobs that are gone may seem to be held: `record.claims`."""
_SILENT_S = 600.0
"""Time without an answer of the scheduler after which the command gives up."""


def run_on_slurm(
    specs: Sequence[RunSpec],
    sweep: SweepFolder,
    *,
    console: Console,
    command: str | None = None,
) -> SweepResult:
    """Submit jobs for the runs that are missing, and follow them until all are over.

    SIGINT, SIGTERM or SIGHUP end this function and not the jobs; the same call follows again.

    Parameters
    ----------
    specs : sequence of RunSpec
        Each run once, at least one, all with the same launcher and tracker settings.
    sweep : SweepFolder
    console : Console
    command : str, optional
        As `record.commands.command_of` returns it.

    Returns
    -------
    SweepResult

    Raises
    ------
    LaunchError
        If the folder cannot be used, or the scheduler refuses a job or does not answer.
    """
    launcher = specs[0].config.launcher
    if not isinstance(launcher, Slurm):
        raise AssertionError("only launcher=slurm has jobs")
    ordered = launch_order(specs)
    check_usable(sweep)
    with sweep_lock(sweep):
        retry = statuses_to_retry(launcher.retry)
        remaining = RemainingRuns(ordered, sweep, retry)
        progress = Progress(console, len(specs))
        progress.runs_skipped(list(remaining.settled.values()))
        # No run is timed on this machine.
        mirror = Mirror(specs[0].config.tracker, sweep, live=bool(remaining.missing))
        follower = _Follower(remaining, sweep, progress)
        try:
            if remaining.missing:
                _open_again(remaining.missing, sweep, retry)
                order = JobOrder(
                    tuple(spec.run_id for spec in ordered), replace(launcher, retry=[]), command
                )
                submitted = _submit_missing(remaining.missing, sweep, order, progress)
                with progress:
                    follower.follow(submitted)
            is_detached = False
        except KeyboardInterrupt:
            is_detached = True
        results = {**remaining.settled, **follower.results}
        Branches(ordered, sweep, lambda run_id: run_id not in results).remove_unneeded()
        note = mirror.finish(interrupted=is_detached)
    runs = remaining.results(follower.results)
    result = SweepResult(runs, is_detached, follower.why_stopped, note, mirror.summary())
    if is_detached:
        progress.note(
            "Detached: the jobs go on. The same command follows again; "
            f"`batchscape status {sweep.path}` shows how far they are, and "
            f"`batchscape cancel {sweep.path}` ends them",
        )
    else:
        progress.summary(result)
    return result


def cancel(sweep: SweepFolder) -> int:
    """Cancel all jobs of a sweep; return how many there were.

    Raises
    ------
    SchedulerError
        If the scheduler does not answer, or refuses.
    """
    live = _live_jobs(sweep)
    scheduler.cancel(live)
    return len(live)


def describe_jobs(sweep: SweepFolder) -> str:
    """Say which jobs of a sweep there are.

    Raises
    ------
    SchedulerError
        If the scheduler does not answer.
    """
    return _describe(jobs(_live_jobs(sweep)).values())


def _describe(sweep_jobs: Iterable[Job]) -> str:
    counts = Counter(
        str(job.state) + f" ({job.reason})" * (job.state is JobState.PENDING and job.reason != "")
        for job in sweep_jobs
    )
    listing = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    return f"Jobs: {listing or 'none'}"


def _live_jobs(sweep: SweepFolder) -> dict[str, str]:
    """Return the names of the jobs of a sweep that are not over, by id."""
    names = [
        job_name(sweep, path.stem.removeprefix("job-")) for path in sweep.slurm.glob("job-*.sh")
    ]
    return active_jobs(names) if names else {}


def _open_again(missing: Sequence[RunSpec], sweep: SweepFolder, retry: frozenset[Status]) -> None:
    """Open the runs whose faults are to be repeated, so that jobs go on with them once."""
    for spec in missing:
        folder = sweep.run(spec.run_id)
        status = RunStatus.read(folder.status)
        if status.status not in retry or (claim := CLAIMS.claim(folder)) is None:
            continue
        status.opened_again("to be repeated").write(folder.status)
        claim.release()


def _submit_missing(
    missing: Sequence[RunSpec], sweep: SweepFolder, order: JobOrder, progress: Progress
) -> list[str]:
    """Submit the jobs that are missing; return their ids."""
    ids = []
    # Without the lock two commands at the same time would each find no job.
    with hold(sweep.slurm / "submitting.lock"):
        live = Counter(_live_jobs(sweep).values())
        (order.extended(sweep) if live else order).write(sweep)
        for shape, specs in shapes(missing).items():
            name = job_name(sweep, shape)
            max_jobs, where = 1, f"{specs[0].geometry.nodes} nodes"
            if shape == POOL:
                max_jobs, where = order.launcher.jobs, "one node"
            path = sweep.slurm / f"job-{shape}.sh"
            write_atomically(path, script(sweep, specs[0], order.launcher).encode())
            submitted = [_submit(path) for _ in range(min(max_jobs, len(specs)) - live[name])]
            counts = [f"{live[name]} there already"] if live[name] else []
            counts += [f"submitted {', '.join(submitted)}"] if submitted else []
            runs = count_text(len(specs), "run")
            progress.note(f"Jobs for {runs} on {where}: {'; '.join(counts)}")
            ids += submitted
    return ids


def _submit(path: Path) -> str:
    try:
        return submit(path)
    except SchedulerError as error:
        texts = []
        for partition in partitions():
            gpus = sorted({group.gpus for group in partition.groups})
            nodes = sum(group.count for group in partition.groups)
            cores = sorted({group.cpus for group in partition.groups})
            texts.append(f"{partition.name} ({nodes} nodes, cores {cores}, GPUs {gpus} each)")
        raise LaunchError(
            f"no job could be submitted: {error}\nPartitions: {'; '.join(texts)}\nScript: {path}"
        ) from None


class _Follower:
    """Reports runs as they end, and finds those whose job is gone."""

    def __init__(self, remaining: RemainingRuns, sweep: SweepFolder, progress: Progress) -> None:
        self._sweep, self._progress = sweep, progress
        self._open_specs = {spec.run_id: spec for spec in remaining.missing}
        self.results: dict[str, RunResult] = {}
        self.why_stopped: str | None = None
        self._job_ids: set[str] = set()
        self._jobs: dict[str, Job] = {}

    def follow(self, submitted: Iterable[str]) -> None:
        """Return once all runs are over, or no job is left."""
        self._job_ids |= set(submitted)
        answered_at = live_at = time.monotonic()
        asked_at = -_QUERY_S
        no_job_is_left = False
        while self._look():
            if time.monotonic() - asked_at >= _QUERY_S:
                try:
                    self._job_ids |= set(_live_jobs(self._sweep))
                    self._jobs = jobs(self._job_ids)
                    live = {name: job for name, job in self._jobs.items() if not job.state.is_over}
                    is_settled = self._end_lost_runs(live)
                    answered_at = asked_at = time.monotonic()
                except SchedulerError as error:
                    asked_at = time.monotonic()
                    if asked_at - answered_at > _SILENT_S:
                        self.why_stopped = f"nothing is known of the jobs: {error}"
                        return
                    self._progress.note_waiting(str(error))
                    continue
                self._progress.note_waiting(_describe(live.values()))
                # A last look, as jobs may have written ends since the one before.
                if not live and no_job_is_left:
                    self.why_stopped = self._why_no_job_is_left() if self._look() else None
                    return
                no_job_is_left = not live and (is_settled or asked_at - live_at > _LEFT_S)
                live_at = asked_at if live else live_at
            time.sleep(_LOOK_S)

    def _look(self) -> bool:
        """Report the runs that are over; return whether others are open."""
        specs = list(self._open_specs.values())
        for spec, status in zip(specs, read_each(self._end, specs, self._sweep.path), strict=True):
            if status is not None:
                del self._open_specs[spec.run_id]
                result = RunResult.of(self._sweep.run(spec.run_id), status)
                self.results[spec.run_id] = result
                self._progress.run_ended(spec, status, result.untimed_reason)
        return bool(self._open_specs)

    def _end(self, spec: RunSpec) -> RunStatus | None:
        """Return the status of a run that is over; None while it is open or cannot be read."""
        folder = self._sweep.run(spec.run_id)
        with suppress(RecordError):
            # At most looks most runs are open, and their claims need not be read.
            if not RunStatus.read(folder.status).status.is_open:
                state = read_state(folder, spec)
                # A launcher keeps a run whose next attempt follows.
                if state.next_step() in {Next.SKIP, Next.LEAVE, Next.REJECT, Next.SEAL}:
                    return state.record
        return None

    def _end_lost_runs(self, live: Mapping[str, Job]) -> bool:
        """Write the ends of runs whose job is gone without having written them.

        Returns
        -------
        bool
            Whether all are written: a claim is free only once it has been silent for a while.
        """
        specs_by_job: defaultdict[str, list[RunSpec]] = defaultdict(list)
        for spec in self._open_specs.values():
            folder = self._sweep.run(spec.run_id)
            with suppress(RecordError):
                if RunStatus.read(folder.status).status is Status.RUNNING:
                    specs_by_job[read_json(folder.launch).get("slurm_job_id", "")].append(spec)
        lost_jobs = jobs(job_id for job_id in specs_by_job if job_id and job_id not in live)
        is_settled = True
        for job_id, job in lost_jobs.items():
            end = _end_of_run(job, is_only_run=len(specs_by_job[job_id]) == 1)
            for spec in specs_by_job[job_id]:
                if job.state.is_over and _end_lost_run(spec, self._sweep.run(spec.run_id), end):
                    self._progress.note(f"{spec.run_id} {end.status}: {end.reason}", "yellow")
                else:
                    is_settled = False
        return is_settled

    def _why_no_job_is_left(self) -> str:
        count = count_text(len(self._open_specs), "run is", "runs are")
        job_texts = [f"{job.id} {job.reason or job.state}" for job in self._jobs.values()]
        jobs_text = f"the jobs ended ({', '.join(job_texts)})" if job_texts else "no job is left"
        logs = self._sweep.slurm / "job-*.txt"
        return f"{jobs_text} and {count} not done; their logs: {logs}"


def _end_of_run(job: Job, *, is_only_run: bool) -> RunEnd:
    """Return the end of a run whose job has ended; `is_only_run`: that job had no other."""
    how = {
        JobState.TIMEOUT: "at its time limit, before a checkpoint was written",
        JobState.PREEMPTED: "as it was preempted",
        JobState.NODE_FAIL: "as a node failed",
        JobState.CANCELLED: "as it was cancelled",
        JobState.OUT_OF_MEMORY: "as it ran out of memory by Slurm's count",
        JobState.UNKNOWN: "and the scheduler does not know how",
    }.get(job.state, f"without a word ({job.reason or job.state})")
    reason = f"job {job.id} ended {how}"
    if job.state is JobState.OUT_OF_MEMORY and is_only_run:
        reason += "; give the job more memory by launcher.sbatch.mem"
        return RunEnd(Status.OOM, reason=reason, cause=Cause.OUT_OF_MEMORY)
    return RunEnd(
        Status.INTERRUPTED,
        reason=f"{reason}; the same command goes on",
        cause=Cause.INTERRUPTED,
    )


def _end_lost_run(spec: RunSpec, folder: RunFolder, end: RunEnd) -> bool:
    """Write the end of a run, unless another job has it by now; return whether it is written."""
    claim = CLAIMS.claim(folder)
    if claim is None:
        return False
    try:
        state = read_state(folder, spec, is_ours=True)
        if not state.is_lost:
            return False
        write_end(spec, folder, state.record, end, state.lost_at)
    except (BatchscapeError, OSError):
        return False  # the next launch meets the error again, and reports it
    finally:
        claim.release()
    return True
