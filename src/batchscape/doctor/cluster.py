"""A cluster, as the machine sees it that is examined; nothing where there is no Slurm."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from batchscape import scheduler
from batchscape.doctor.finding import Finding
from batchscape.errors import SchedulerError
from batchscape.record.claims import CLAIMS
from batchscape.record.disk import is_of_this_machine
from batchscape.record.folder import RunFolder
from batchscape.scheduler import NodeGroup

__all__ = ["shared_folder", "slurm"]

_UNUSABLE = ("down", "drain", "fail", "maint", "unknown", "no_respond", "power")
_MOST_SKEW_S = 5.0
"""More shows in the times of records; claims do not compare clocks."""


def slurm() -> list[Finding]:
    """Examine the scheduler: what there is, and what it can tell of a job that ended."""
    if not scheduler.is_available():
        return []
    try:
        settings = scheduler.settings()
        partitions = scheduler.partitions()
    except SchedulerError as error:
        repair = (
            "try `scontrol ping`; from another machine SLURM_CONF and munge must be the cluster's"
        )
        return [Finding("Slurm", "broken", str(error), repair)]
    groups = {group.nodes: group for one in partitions if one.is_up for group in one.groups}
    names = ", ".join(
        f"{p.name}{'*' * p.is_default} ({_limit(p.time_limit_s)})" for p in partitions if p.is_up
    )
    version = settings.get("SLURM_VERSION", "of an unknown version")
    told = f"{version}, cluster {settings.get('ClusterName')}, partitions: {names or 'none is up'}"
    found = [Finding("Slurm", "ok" if names else "broken", told, "ask who runs the cluster")]
    return [*found, *_nodes(groups), _accounting(settings), _cgroups(settings)]


def _nodes(groups: Mapping[str, NodeGroup]) -> list[Finding]:
    usable = [g for g in groups.values() if g.is_responding and not g.state.startswith(_UNUSABLE)]
    lost = [g for g in groups.values() if g not in usable]
    total = sum(group.count for group in groups.values())
    kinds = sorted({f"{g.cpus} cores and {g.memory_mib / 1024:.0f} GiB" for g in usable})
    detail = f"{sum(group.count for group in usable)} of {total} can be used: {', '.join(kinds)}"
    for group in lost:
        detail += f"; {group.nodes} {group.state}{f' ({group.reason})' if group.reason else ''}"
    repair = "sinfo -R; `scontrol update NodeName=... State=RESUME` once the reason is gone"
    gpus: Counter[str] = Counter()
    for group in usable:
        for gres in group.gres:
            if gres.name == "gpu":
                gpus[f"{gres.count} {gres.kind}".strip()] += group.count
    each = ", ".join(f"{count} nodes with {kind}" for kind, count in gpus.items())
    no_gpus = "GresTypes=gpu and Gres=gpu:... of nodes in slurm.conf; runs on CPUs need none"
    return [
        Finding("Slurm nodes", "ok" if not lost else "broken", detail, repair),
        Finding("Slurm GPUs", "ok" if gpus else "missing", each or "no node has any", no_gpus),
    ]


def _limit(time_s: float) -> str:
    return "no time limit" if math.isinf(time_s) else f"{time_s / 3600:g} h"


def _accounting(settings: Mapping[str, str]) -> Finding:
    kind = settings.get("AccountingStorageType", "none").rpartition("/")[2]
    if kind not in {"none", "(null)"}:
        return Finding("Slurm accounting", "ok", kind)
    age = settings.get("MinJobAge", "MinJobAge")
    detail = f"none: how a job ended is known for {age}, and memory of its steps never"
    return Finding("Slurm accounting", "missing", detail, "slurmdbd; runs themselves need none")


def _cgroups(settings: Mapping[str, str]) -> Finding:
    processes = settings.get("ProctrackType") == "proctrack/cgroup"
    tasks = "task/cgroup" in settings.get("TaskPlugin", "")
    memory = tasks and settings.get("ConstrainRAMSpace") == "yes"
    detail = (
        f"processes {'end with their job' if processes else 'may outlive their job'}, memory is "
        f"{'kept to what was asked for' if memory else 'not limited'}"
    )
    repair = (
        "ProctrackType=proctrack/cgroup, TaskPlugin=task/cgroup, ConstrainRAMSpace=yes; without "
        "them a job that has no memory left is told as failed"
    )
    return Finding("Slurm cgroups", "ok" if processes and memory else "missing", detail, repair)


def shared_folder(outputs: Path) -> list[Finding]:
    """Try to claim a run where sweeps go, and compare its clock; on a cluster only.

    Parameters
    ----------
    outputs : Path
        Need not exist: the folder above it counts that does.
    """
    if not scheduler.is_available():
        return []
    place = outputs.absolute()
    while not place.is_dir():
        place = place.parent
    what = "shared folder"
    with tempfile.TemporaryDirectory(prefix=".batchscape-doctor-", dir=place) as folder:
        run = RunFolder(Path(folder))
        claim = CLAIMS.claim(run)
        if claim is None or CLAIMS.claim(run) is not None:
            repair = "put sweep_dir elsewhere: docs/slurm.md says what it must guarantee"
            return [Finding(what, "broken", f"{place}: a run is not one launcher's alone", repair)]
        has_locks = bool(claim.descriptors)
        claim.release(is_over=True)
        mark = run.path / "clock"
        before = time.time()
        mark.touch()
        # The server of a file system gives the time, and some of them round it down to seconds.
        touched, after = mark.stat().st_mtime, time.time()
    skew_s = max(before - 1.0 - touched, touched - after, 0.0)
    locks = "with locks" if has_locks else "without locks: slower to see who is gone"
    found = [Finding(what, "ok", f"{place}: claims hold, {locks}")]
    if is_of_this_machine(place):
        detail = f"{place} is on a disk of this machine"
        repair = "a sweep of jobs needs a sweep_dir that all nodes see, under this path"
        found = [Finding(what, "missing", detail, repair)]
    if skew_s > _MOST_SKEW_S:
        detail = f"the clock of the file server differs by {skew_s:.0f} s from that of this machine"
        found.append(Finding("clocks", "broken", detail, "chronyc tracking; on both of them"))
    else:
        detail = "this machine and the file server agree; those of nodes cannot be seen from here"
        found.append(Finding("clocks", "ok", detail))
    return found
