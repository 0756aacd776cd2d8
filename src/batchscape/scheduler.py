"""Jobs of a cluster's scheduler, Slurm, by its own commands.

The formats are those of https://slurm.schedmd.com/squeue.html and sacct.html, which
releases keep: names of states, and fields that are asked for by name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from batchscape.errors import SchedulerError

_ANSWER_S = 60.0
"""Longest time of a command: a busy controller has taken 30 s."""


class JobState(StrEnum):
    """State of a job, as far as it matters here."""

    PENDING = "pending"
    RUNNING = "running"
    """It has processes, or may have: a job that is being ended still runs."""
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    CANCELLED = "cancelled"
    OUT_OF_MEMORY = "out_of_memory"
    """By the memory cgroup of the job: without cgroups such a job has failed."""
    UNKNOWN = "unknown"
    """No such job: it never existed, or has ended so long ago that it is forgotten."""

    @property
    def is_over(self) -> bool:
        """Whether the job has no processes, and never will have any."""
        return self not in {JobState.PENDING, JobState.RUNNING}


_STATES = {
    name: state
    for state, names in {
        JobState.PENDING: "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT",
        JobState.RUNNING: "RUNNING COMPLETING CONFIGURING RESIZING SIGNALING STAGE_OUT STOPPED "
        "SUSPENDED",
        JobState.COMPLETED: "COMPLETED",
        JobState.FAILED: "FAILED LAUNCH_FAILED",
        JobState.TIMEOUT: "TIMEOUT DEADLINE",
        JobState.PREEMPTED: "PREEMPTED",
        JobState.NODE_FAIL: "NODE_FAIL BOOT_FAIL",
        JobState.CANCELLED: "CANCELLED REVOKED",
        JobState.OUT_OF_MEMORY: "OUT_OF_MEMORY",
    }.items()
    for name in names.split()
}
"""Our state for every state that squeue and sacct document."""


@dataclass(frozen=True)
class Job:
    """A job, as the scheduler sees it now."""

    id: str
    state: JobState
    reason: str = ""
    """Why it waits, or how it ended, in the scheduler's words; empty where there is no reason."""


def is_available() -> bool:
    """Whether this machine has the commands of Slurm."""
    return shutil.which("squeue") is not None


def jobs(ids: Iterable[str]) -> dict[str, Job]:
    """Return the states of jobs, by at most two commands however many there are.

    The controller is asked first: it alone knows which jobs live, and how those ended that it has
    not forgotten yet (`MinJobAge`, 5 minutes by default). Accounting, where there is any, is asked
    for those that have ended: it forgets none.
    """
    job_ids = sorted(set(ids))
    if not job_ids:
        return {}
    jobs_by_id = _jobs_of_queue(job_ids)
    ended = [
        job_id for job_id in job_ids if job_id not in jobs_by_id or jobs_by_id[job_id].state.is_over
    ]
    if ended:
        # There may be no accounting; its database may be down, or behind the controller, which
        # alone knows which jobs live.
        with suppress(SchedulerError):
            accounted = _jobs_of_accounting(ended)
            jobs_by_id |= {job_id: job for job_id, job in accounted.items() if job.state.is_over}
    unknown = "the scheduler does not know it, or not any more"
    return {
        job_id: jobs_by_id.get(job_id) or Job(job_id, JobState.UNKNOWN, unknown)
        for job_id in job_ids
    }


def active_jobs(names: Iterable[str]) -> dict[str, str]:
    """Return the jobs of this user with some names that wait or run: names by id."""
    command = ("squeue", "--noheader", "--me", f"--name={','.join(names)}")
    answer = _ask(*command, "--states=all", "--format=%i|%T|%j")
    lines = (line.split("|", maxsplit=2) for line in answer.splitlines())
    # A completing job does nothing any more.
    return {
        job_id: name
        for job_id, state, name in lines
        if state != "COMPLETING" and not _state(state).is_over
    }


def submit(script: Path) -> str:
    """Submit a shell script with its `#SBATCH` comments; return the job's id."""
    return _ask("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def cancel(ids: Iterable[str]) -> None:
    """Cancel jobs, except those that are over or unknown."""
    names = sorted(set(ids))
    if names:
        _ask("scancel", "--quiet", *names)


def _jobs_of_queue(ids: list[str]) -> dict[str, Job]:
    # A reason is a sentence, and no character is sure not to be in it.
    command = ("squeue", "--noheader", "--states=all", "--format=%i|%T|%r")
    answer = _ask(*command, f"--jobs={','.join(ids)}", allowed="Invalid job id")
    lines = (line.split("|", maxsplit=2) for line in answer.splitlines())
    return {
        name: Job(name, _state(state), "" if reason == "None" else reason)
        for name, state, reason in lines
    }


def _jobs_of_accounting(ids: list[str]) -> dict[str, Job]:
    """Return jobs of accounting, which not every cluster has."""
    command = ("sacct", "--noheader", "--parsable2", "--allocations")
    answer = _ask(*command, f"--jobs={','.join(ids)}", "--format=JobID,State,ExitCode")
    lines = (line.split("|") for line in answer.splitlines())
    return {
        name: Job(name, _state(state), _ended_text(state, exit_code))
        for name, state, exit_code in lines
    }


def _ended_text(state: str, exit_code: str) -> str:
    code, _, signal = exit_code.partition(":")
    if signal not in {"", "0"}:
        # Signal 125 stands for Slurm's own count of memory.
        return state if signal == "125" else f"{state}, signal {signal}"
    return state if code in {"", "0"} else f"{state}, exit code {code}"


def _state(name: str) -> JobState:
    """Return our state for one of Slurm, such as `CANCELLED by 1000`."""
    try:
        return _STATES[name.split(maxsplit=1)[0]]
    except (KeyError, IndexError):
        msg = f"a job is in state {name!r}, which this release of batchscape does not know"
        raise SchedulerError(msg) from None


_DEFAULTS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SBATCH_")
"""Variables by which users choose other formats and selections for themselves."""


def _ask(program: str, *arguments: str, allowed: str | None = None) -> str:
    """Return the output of a command of Slurm; empty where it fails with the allowed error."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_DEFAULTS)
    }
    try:
        process = subprocess.run(
            [program, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            check=False,
        )
    except FileNotFoundError:
        msg = f"there is no {program} here; Slurm is asked on machines that have its commands"
        raise SchedulerError(msg) from None
    except OSError as error:
        msg = f"{program} cannot be started: {error}"
        raise SchedulerError(msg) from None
    except subprocess.TimeoutExpired:
        msg = f"Slurm does not answer: {program} took more than {_ANSWER_S:.0f} s"
        raise SchedulerError(msg) from None
    if process.returncode == 0:
        return process.stdout
    message = process.stderr.strip() or process.stdout.strip() or f"exit code {process.returncode}"
    if allowed is not None and allowed in message:
        return ""
    msg = f"{program} failed: {message}"
    raise SchedulerError(msg)
