"""Whether a run fits: the memory that a rank has, and what its tensors are predicted to take."""

from __future__ import annotations

import math
from pathlib import Path

import psutil

from batchscape.measure.memory_report import MemoryReport
from batchscape.plan.forecast import NOT_KNOWN, MemoryForecast, PredictedRange
from batchscape.plan.machine import Machine
from batchscape.record.spec import RunSpec
from batchscape.system import GIB

_PREDICTION_ERROR = {"cpu": (0.03, 0.03, 0.0), "cuda": (0.10, 0.10, 0.125)}
"""Shares that a predicted peak of tensors may be too high and too low, and GiB that it may be too
low besides: docs/planning.md. On CUDA 64 MiB are what cuBLAS works in on Hopper, and four settings
of GPT-2 on one H200 were 21 to 39 MiB above their predictions, 0.1 to 1.5 % (docs/gpu.md). They are
few, of one model and of one device, hence the share."""
_CGROUP = Path("/sys/fs/cgroup")
_PROCESS_OVERHEAD = {"cpu": (2.5, 0.05), "cuda": (1.2, 1.0)}
"""What a process takes for its tensors at most, as a multiple and in GiB. CPU: private memory, of
models of some MiB 1.2 to 2.4 times as much. CUDA: blocks that the allocator rounds up and keeps
(1.01 to 1.2 times, by its rules), context, kernels and NCCL."""


def room_gib(spec: RunSpec, machine: Machine) -> float | None:
    """Return what a rank can have at most, in GiB."""
    limit = spec.config.device.memory_limit_gib
    ranks = spec.geometry.data_parallel_size
    if spec.device_type == "cpu":
        # On a CPU the limit is one rank's.
        return _host_gib() / ranks if limit is None else limit
    ranks_per_device = math.ceil(ranks / max(1, machine.devices("cuda")))
    sizes = [device.memory_gib for device in machine.cuda_devices]
    if limit is None:
        limit = max((math.inf if size is None else size for size in sizes), default=math.inf)
    return None if math.isinf(limit) else limit / ranks_per_device


def _host_gib() -> float:
    """Return the memory of this machine, or of the control group that this process is in."""
    total = float(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            total = min(total, float((_CGROUP / name).read_text()))
        except (OSError, ValueError):
            continue  # another version of control groups, or `max`
    return total / GIB


def memory_forecast(
    spec: RunSpec,
    report: MemoryReport,
    machine: Machine,
    measured: tuple[float, float, int] | None = None,
) -> MemoryForecast:
    """Return what a run's ranks will hold, and whether that fits."""
    room, value = room_gib(spec, machine), report.peak_allocated_gib
    if value is None:
        return MemoryForecast(f"{NOT_KNOWN}: {report.problem}", room_gib=room)
    way = report.method
    above, below, workspace = _PREDICTION_ERROR[spec.device_type]
    low, high = 1 - above, 1 + below
    if measured is not None:
        learned, high, count = measured
        # Runs that do not fit are never measured, so measured runs may lower the low end but not
        # raise it.
        low, workspace = min(low, learned), 0.0
        way = f"{way}, range of {count} measured"
    peak = PredictedRange(value * low, value * high + workspace, value)
    times, more = _PROCESS_OVERHEAD[spec.device_type]
    if room is not None and peak.low > room:
        return MemoryForecast(way, peak, room, "does not fit")
    is_sure = room is not None and times * peak.high + more <= room
    return MemoryForecast(way, peak, room, "fits" if is_sure else "unsure")


def why_not_launched(spec: RunSpec, memory: MemoryForecast | None) -> str | None:
    """Return why a run is rejected for its memory; None where it is launched."""
    if memory is None or memory.peak_allocated_gib is None:
        return None
    return why_too_large(spec, memory.peak_allocated_gib.low, memory.room_gib)


def why_too_large(spec: RunSpec, least_gib: float | None, room: float | None) -> str | None:
    """Return why tensors of at least `least_gib` do not fit; None: the run is launched."""
    if least_gib is None or room is None or least_gib <= room:
        return None
    if not spec.config.launcher.skip_unfit:
        return None
    return (
        f"its tensors are predicted to take at least {least_gib:.4g} GiB on each device, and there "
        f"are {room:.4g}; launcher.skip_unfit=false launches it"
    )
