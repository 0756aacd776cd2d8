"""Jobs and nodes of a cluster's scheduler, Slurm, by its own commands.

The formats are those of https://slurm.schedmd.com/squeue.html, sacct.html and sinfo.html, which
releases keep: names of states, and fields that are asked for by name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from pathlib import Path

from batchscape.errors import SchedulerError

_ANSWER_LIMIT_S = 60.0
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
    """As in the question."""
    state: JobState
    reason: str = ""
    """Why it waits, or how it ended, in the scheduler's words; empty where there is no reason."""
    restarts: int | None = None
    """How often it was put back into the queue; None where only accounting knows the job."""
    nodes: str = ""
    """Its nodes, as a list of hosts: `node[1-3]`."""


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of a partition."""

    count: int
    cpus: int
    gpus: int
    """GPUs of each node, of all kinds."""


@dataclass(frozen=True)
class Partition:
    """A partition that this user may see."""

    name: str
    is_default: bool
    is_up: bool
    groups: list[NodeGroup]


def is_available() -> bool:
    """Whether this machine has the commands of Slurm."""
    return shutil.which("squeue") is not None


def jobs(ids: Iterable[str]) -> dict[str, Job]:
    """Return the states of jobs (`123`, or `123_4` for a task of an array).

    The controller is asked first: it alone knows which jobs live, and how those ended that it has
    not forgotten yet (`MinJobAge`, 5 minutes by default). Accounting, where there is any, is asked
    for those that have ended: it forgets none, and knows their steps too.
    """
    job_ids = sorted(set(ids))
    if not job_ids:
        return {}
    jobs_by_id = _jobs_of_queue(job_ids)
    ended_ids = [
        job_id for job_id in job_ids if job_id not in jobs_by_id or jobs_by_id[job_id].state.is_over
    ]
    if ended_ids:
        # There may be no accounting; its database may be down, or behind the controller, which
        # alone knows which jobs live.
        with suppress(SchedulerError):
            for job_id, job in _jobs_of_accounting(ended_ids).items():
                if job.state.is_over:
                    queued = jobs_by_id.get(job_id, job)
                    jobs_by_id[job_id] = replace(job, restarts=queued.restarts)
    unknown = "the scheduler does not know the job, or has forgotten it"
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


def partitions() -> list[Partition]:
    """Return the partitions and their nodes."""
    answer = _ask("sinfo", "--noheader", "--exact", "--format=%P|%a|%D|%c|%G")
    partitions_by_name: dict[str, Partition] = {}
    for line in answer.splitlines():
        label, up, count, cpus, gres = line.split("|")
        # Such as `gpu:a100:4(S:0-1),gpu:2,gpu:t4:no_consume:1,license:1`.
        gpus = re.findall(r"(?:^|,)gpu:(?:[^,(]*:)?(\d+)(?=[,(]|$)", gres)
        group = NodeGroup(int(count), int(cpus), sum(map(int, gpus)))
        name = label.removesuffix("*")
        partition = Partition(name, name != label, up == "up", [])
        groups = partitions_by_name.setdefault(name, partition).groups
        if group.count:
            groups.append(group)
    return list(partitions_by_name.values())


_QUEUE_FIELDS = {
    "JobID": 32,
    "JobArrayID": 32,
    "State": 32,
    "RestartCnt": 8,
    "NodeList": 512,
    "Reason": 256,
}
"""Fields by their widths: a reason is a sentence, and no character is sure not to be in it."""


def _jobs_of_queue(ids: list[str]) -> dict[str, Job]:
    widths = _QUEUE_FIELDS.values()
    fields = ",".join(f"{name}:{width}" for name, width in _QUEUE_FIELDS.items())
    command = ("squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(ids)}")
    answer = _ask(*command, f"--Format={fields}", allowed="Invalid job id")
    jobs_by_name = {}
    for line in answer.splitlines():
        job_id, task_id, state, restarts, nodes, reason = (
            line[end - width : end].strip()
            for width, end in zip(widths, accumulate(widths), strict=True)
        )
        reason = "" if reason == "None" else reason
        for name in {job_id, task_id}:  # a task of an array has two names
            jobs_by_name[name] = Job(name, _state(state), reason, int(restarts), nodes)
    return jobs_by_name


def _jobs_of_accounting(ids: list[str]) -> dict[str, Job]:
    """Return jobs of accounting, which not every cluster has."""
    command = ("sacct", "--noheader", "--parsable2", f"--jobs={','.join(ids)}")
    fields = "--format=JobID,JobIDRaw,State,ExitCode,NodeList"
    answer = _ask(*command, fields)
    jobs_by_name: dict[str, Job] = {}
    for line in answer.splitlines():
        task_id, job_id, state, exit_code, nodes = line.split("|", maxsplit=4)
        job = Job("", _state(state), _ended_text(state, exit_code), None, nodes)
        for name, _, step in {task_id.partition("."), job_id.partition(".")}:
            if not step:
                jobs_by_name[name] = replace(job, id=name)
            elif (
                job.state is JobState.OUT_OF_MEMORY
                and name in jobs_by_name
                and jobs_by_name[name].state is JobState.FAILED
            ):
                # The job failed as one of its steps had no memory left.
                reason = f"{job.reason} in step {step}"
                jobs_by_name[name] = replace(jobs_by_name[name], state=job.state, reason=reason)
    return jobs_by_name


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
        raise SchedulerError(
            f"a job is in state {name!r}, which this release of batchscape does not know"
        ) from None


_DEFAULT_VARIABLES = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SBATCH_")
"""Variables by which users choose other formats and selections for themselves."""


def _ask(program: str, *arguments: str, allowed: str | None = None) -> str:
    """Return the output of a command of Slurm; empty where it fails with the allowed error."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_DEFAULT_VARIABLES)
    }
    try:
        process = subprocess.run(
            [program, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_LIMIT_S,
            check=False,
        )
    except OSError as error:
        raise SchedulerError(
            f"Slurm's command {program} is not on the PATH, or cannot be started ({error}); run "
            "batchscape where it is, such as on a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(
            f"Slurm does not answer: {program} took more than {_ANSWER_LIMIT_S:.0f} s"
        ) from None
    if process.returncode == 0:
        return process.stdout
    message = process.stderr.strip() or process.stdout.strip() or f"exit code {process.returncode}"
    if allowed is not None and allowed in message:
        return ""
    raise SchedulerError(f"{program} failed: {message}")
