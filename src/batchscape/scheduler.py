"""What a cluster's scheduler, Slurm, says of jobs and nodes; asked by its own commands.

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
from pathlib import Path

from batchscape.errors import SchedulerError

__all__ = [
    "Job",
    "JobState",
    "NodeGroup",
    "Partition",
    "cancel",
    "is_available",
    "jobs",
    "named",
    "partitions",
    "submit",
]

_ANSWER_S = 60.0
"""Longest time that a command may take: a controller that is busy has been seen to take 30 s."""


class JobState(StrEnum):
    """How a job stands, as far as it matters here."""

    PENDING = "pending"
    RUNNING = "running"
    """It has processes, or may have: one that is being ended is running still."""
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    CANCELLED = "cancelled"
    OUT_OF_MEMORY = "out_of_memory"
    """As the memory cgroup of the job counted it: without cgroups such a job has failed."""
    UNKNOWN = "unknown"
    """Nobody knows the job: it never was, or has ended so long ago that it is forgotten."""

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
"""Every state that squeue and sacct document, and what it means here."""


@dataclass(frozen=True)
class Job:
    """A job, as the scheduler sees it now."""

    id: str
    """As it was asked for."""
    state: JobState
    reason: str = ""
    """Why it waits, or how it ended, in the scheduler's words; empty where it says nothing."""
    restarts: int | None = None
    """How often it was put back into the queue; None where only accounting knows the job."""
    nodes: str = ""
    """Its nodes, as a list of hosts: `node[1-3]`."""


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of a partition that are alike."""

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
    groups: tuple[NodeGroup, ...]


def is_available() -> bool:
    """Whether this machine has the commands of Slurm."""
    return shutil.which("squeue") is not None


def jobs(ids: Iterable[str]) -> dict[str, Job]:
    """Ask how jobs stand, all of them at once.

    The controller is asked first: it alone knows which jobs live, and how those ended that it has
    not forgotten yet (`MinJobAge`, 5 minutes by default). Where there is accounting, it is asked
    for those that have ended: it forgets none, and knows of their steps, too.

    Parameters
    ----------
    ids : iterable of str
        `123`; for a task of an array also `123_4`.

    Returns
    -------
    dict of str to Job
        Every one that was asked for; `JobState.UNKNOWN` where nobody knows it.

    Raises
    ------
    SchedulerError
        If there is no Slurm here, or its controller does not answer: nothing is known then.
    """
    wanted = sorted(set(ids))
    if not wanted:
        return {}
    found = _queued(wanted)
    ended = [name for name in wanted if name not in found or found[name].state.is_over]
    if ended:
        # There may be no accounting, or its database may be down, or behind the controller, which
        # alone knows what lives.
        with suppress(SchedulerError):
            for name, job in _accounted(ended).items():
                if job.state.is_over:
                    restarts = found[name].restarts if name in found else None
                    found[name] = Job(name, job.state, job.reason, restarts, job.nodes)
    unknown = "the scheduler does not know it, or not any more"
    return {name: found.get(name) or Job(name, JobState.UNKNOWN, unknown) for name in wanted}


def named(names: Iterable[str]) -> dict[str, str]:
    """Return the jobs of this user that have some names, and wait or are at work: names by id.

    Raises
    ------
    SchedulerError
        If there is no Slurm here, or it does not answer.
    """
    command = ("squeue", "--noheader", "--me", f"--name={','.join(names)}")
    answer = _ask(*command, "--states=all", "--format=%i|%T|%j")
    found = (line.split("|", maxsplit=2) for line in answer.splitlines())
    # One that is being ended does nothing any more.
    return {
        own: name
        for own, state, name in found
        if state != "COMPLETING" and not _state(state).is_over
    }


def submit(script: Path) -> str:
    """Submit a script of shell, whose comments say what it asks for; return the job's id.

    Raises
    ------
    SchedulerError
        If there is no Slurm here, or it refuses.
    """
    return _ask("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def cancel(ids: Iterable[str]) -> None:
    """Cancel jobs; nothing happens to those that are over, or that nobody knows.

    Raises
    ------
    SchedulerError
        If there is no Slurm here, if it does not answer, or if it refuses.
    """
    wanted = sorted(set(ids))
    if wanted:
        _ask("scancel", "--quiet", *wanted)


def partitions() -> list[Partition]:
    """Ask what there is: partitions, and their nodes.

    Raises
    ------
    SchedulerError
        If there is no Slurm here, or it does not answer.
    """
    answer = _ask("sinfo", "--noheader", "--exact", "--format=%P|%a|%D|%c|%G")
    found: dict[str, Partition] = {}
    for line in answer.splitlines():
        name, up, count, cpus, gres = line.split("|")
        group = NodeGroup(int(count), int(cpus), _gpus(gres))
        own = name.removesuffix("*")
        before = found[own].groups if own in found else ()
        groups = (*before, group) if group.count else before
        found[own] = Partition(own, own != name, up == "up", groups)
    return list(found.values())


_QUEUE_FIELDS = {
    "JobID": 32,
    "JobArrayID": 32,
    "State": 32,
    "RestartCnt": 8,
    "NodeList": 512,
    "Reason": 256,
}
"""Fields by their widths: a reason is a sentence, and no character is sure not to be in it."""


def _queued(ids: list[str]) -> dict[str, Job]:
    fields = ",".join(f"{name}:{width}" for name, width in _QUEUE_FIELDS.items())
    command = ("squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(ids)}")
    answer = _ask(*command, f"--Format={fields}", allowed="Invalid job id")
    found = {}
    for line in answer.splitlines():
        values, start = [], 0
        for width in _QUEUE_FIELDS.values():
            values.append(line[start : start + width].strip())
            start += width
        own, of_array, state, restarts, nodes, reason = values
        reason = "" if reason == "None" else reason
        for name in {own, of_array}:  # a task of an array has two names
            found[name] = Job(name, _state(state), reason, int(restarts), nodes)
    return found


def _accounted(ids: list[str]) -> dict[str, Job]:
    """Ask accounting, which not every cluster has."""
    command = ("sacct", "--noheader", "--parsable2", f"--jobs={','.join(ids)}")
    fields = "--format=JobID,JobIDRaw,State,ExitCode,NodeList"
    answer = _ask(*command, fields)
    found: dict[str, Job] = {}
    for line in answer.splitlines():
        of_array, own, state, exit_code, nodes = line.split("|", maxsplit=4)
        ended = Job("", _state(state), _ended(state, exit_code), None, nodes)
        for name, _, step in {of_array.partition("."), own.partition(".")}:
            if not step:
                found[name] = replace(ended, id=name)
            elif (
                ended.state is JobState.OUT_OF_MEMORY
                and name in found
                and found[name].state is JobState.FAILED
            ):
                # The job failed as one of its steps had no memory left.
                reason = f"{ended.reason} in step {step}"
                found[name] = replace(found[name], state=ended.state, reason=reason)
    return found


def _ended(state: str, exit_code: str) -> str:
    code, _, signal = exit_code.partition(":")
    if signal not in {"", "0"}:
        # Slurm's own count of memory is told as signal 125.
        return state if signal == "125" else f"{state}, signal {signal}"
    return state if code in {"", "0"} else f"{state}, exit code {code}"


def _state(name: str) -> JobState:
    """Return what a state means; `CANCELLED by 1000` tells the user, too."""
    try:
        return _STATES[name.split(maxsplit=1)[0]]
    except (KeyError, IndexError):
        msg = f"a job is in state {name!r}, which this release of batchscape does not know"
        raise SchedulerError(msg) from None


def _gpus(gres: str) -> int:
    """Count the GPUs of `gpu:a100:4(S:0-1),gpu:2,license:1`."""
    entries = [entry.split(":") for entry in re.sub(r"\([^)]*\)", "", gres).split(",")]
    return sum(int(parts[-1]) for parts in entries if parts[0] == "gpu" and parts[-1].isdigit())


_DEFAULTS = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SBATCH_")
"""Variables by which users choose other formats and selections for themselves."""


def _ask(program: str, *arguments: str, allowed: str | None = None) -> str:
    """Run a command of Slurm; one that fails as allowed has nothing to say."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_DEFAULTS)
    }
    try:
        done = subprocess.run(
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
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
    if allowed is not None and allowed in said:
        return ""
    msg = f"{program} failed: {said}"
    raise SchedulerError(msg)
