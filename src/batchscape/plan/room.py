"""Whether a run fits: the memory that a rank has, and what its tensors are predicted to take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import psutil

from batchscape.measure.memory_report import GIB, MemoryReport
from batchscape.plan.machine import Machine
from batchscape.record.spec import RunSpec

__all__ = ["fit_in", "predicted_peak", "room_gib"]

_OFF = {"cpu": 0.03, "cuda": 0.10}
"""Share that a predicted peak of tensors may be off, either way: docs/planning.md."""
_BESIDE = {"cpu": (2.5, 0.05), "cuda": (1.2, 1.0)}
"""What a process takes for its tensors at most, as a multiple and in GiB. CPU: private memory, of
models of some MiB 1.2 to 2.4 times as much. CUDA: blocks that the allocator rounds up and keeps
(1.01 to 1.2 times, by its rules), context, kernels and NCCL."""


def room_gib(spec: RunSpec, machine: Machine) -> float | None:
    """Return what a rank can have at most, in GiB.

    Parameters
    ----------
    spec : RunSpec
    machine : Machine

    Returns
    -------
    float or None
        Its part of the limit that is emulated, or of its device; on a CPU of all memory. None where
        the memory of the devices is not known.
    """
    limit = spec.config.device.memory_limit_gib
    ranks = spec.geometry.data_parallel_size
    if spec.device_type == "cpu":
        # There a limit is of a rank.
        return psutil.virtual_memory().total / GIB / ranks if limit is None else limit
    sharing = math.ceil(ranks / max(1, machine.devices("cuda")))
    sizes = [device.memory_gib for device in machine.cuda_devices if device.memory_gib is not None]
    whole = min(sizes, default=None) if limit is None else limit
    return None if whole is None else whole / sharing


def predicted_peak(spec: RunSpec, report: MemoryReport) -> dict[str, Any] | None:
    """Return the predicted peak of a rank's tensors, as records and plans carry it.

    Parameters
    ----------
    spec : RunSpec
    report : MemoryReport
        As `predict_memories` returns it.

    Returns
    -------
    dict or None
        `value`, `low` and `high` in GiB, and the `method`; None where it is not predicted.
    """
    value = report.peak_allocated_gib
    if value is None:
        return None
    off = _OFF[spec.device_type]
    ends = {"low": value * (1 - off), "high": value * (1 + off)}
    return {"value": value, **ends, "method": report.method}


def fit_in(
    room: float | None, spec: RunSpec, peak: Mapping[str, Any]
) -> Literal["fits", "unsure", "does not fit"]:
    """Say whether a run fits.

    Parameters
    ----------
    room : float or None
        As `room_gib` returns it.
    spec : RunSpec
    peak : mapping
        As `predicted_peak` returns it.
    """
    times, more = _BESIDE[spec.device_type]
    if room is None:
        return "unsure"
    if peak["low"] > room:
        return "does not fit"
    return "fits" if times * peak["high"] + more <= room else "unsure"
