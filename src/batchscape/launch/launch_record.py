"""What `launch.json` says: how a run is placed, and whether its times can be compared."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from batchscape.launch.devices import Lease
from batchscape.record.spec import RunSpec
from batchscape.record.timing import invalidate_times, processes_share, runs_share
from batchscape.text import count_text

if TYPE_CHECKING:
    from batchscape.plan.machine import Machine

__all__ = ["OTHER_LAUNCHER", "launch_record", "with_times_of"]

OTHER_LAUNCHER = "another launcher was at work on this machine"
"""Why times are not valid that were taken beside one."""
_EARLIER = "an earlier attempt: "


def launch_record(spec: RunSpec, lease: Lease, machine: Machine, *, others: bool) -> dict[str, Any]:
    """Describe how a run is placed, and whether its times can be compared."""
    concurrent = spec.config.launcher.concurrent_runs
    sharing = min(concurrent, spec.config.launcher.runs_per_device)
    # Numbers of the devices of a CPU are cores.
    leased = [d for d in machine.cuda_devices if d.index in lease.devices]
    leased = leased if spec.device_type == "cuda" else []
    why = []
    if lease.oversubscribed and spec.device_type == "cuda":
        devices = count_text(len(lease.devices), "CUDA device")
        why.append(processes_share(f"{lease.ranks} ranks", devices))
    if lease.ranks > machine.cpu_cores:
        why.append(processes_share(f"{lease.ranks} ranks", f"{machine.cpu_cores} cores"))
    if sharing > 1:
        why.append(runs_share(sharing, "a device"))
    oversubscribed = bool(why)
    workers = spec.config.loader.workers
    if workers and lease.ranks <= machine.cpu_cores < (processes := lease.ranks * (1 + workers)):
        ranks, each = count_text(lease.ranks, "rank"), " each" * (lease.ranks > 1)
        why.append(
            processes_share(
                f"{ranks} with {count_text(workers, 'loader worker')}{each}, "
                f"{processes} processes,",
                f"{machine.cpu_cores} cores",
            )
        )
    if concurrent > 1:
        why.append(runs_share(concurrent, "the machine"))
    if others:
        why.append(OTHER_LAUNCHER)
    memories = [d.memory_gib for d in leased if d.memory_gib is not None]
    return {
        "world_size": lease.ranks,
        "device_type": spec.device_type,
        "device_model": " + ".join(sorted({d.name for d in leased}))
        if spec.device_type == "cuda"
        else machine.cpu_name,
        "devices": list(lease.devices),
        # Of a CPU, environment.json has what all ranks share.
        **({"device_memory_gib": min(memories)} if memories else {}),
        "usable_cores": machine.cpu_cores,
        "threads_per_rank": 1,
        "concurrent_runs": concurrent,
        "runs_per_device": sharing,
        "oversubscribed": oversubscribed,
        # Who asks Slurm how a job ended has to know which.
        **({"slurm_job_id": job} if (job := os.environ.get("SLURM_JOB_ID")) else {}),
        "timing_valid": not why,
        "timing_invalid_reason": "; ".join(why) or None,
    }


def with_times_of(before: dict[str, Any], launch: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a run that goes on: its rows are those of all its attempts."""
    launch = dict(launch)
    then, now = before.get("usable_cores"), launch["usable_cores"]
    if then != now:
        invalidate_times(launch, f"usable cores changed from {then} to {now} between attempts")
    if not before.get("timing_valid"):
        reasons = str(before.get("timing_invalid_reason") or "no reason recorded").split("; ")
        known = str(launch["timing_invalid_reason"]).split("; ")
        for reason in (reason.removeprefix(_EARLIER) for reason in reasons):
            if reason not in known:
                invalidate_times(launch, _EARLIER + reason)
    return launch
