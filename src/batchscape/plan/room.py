"""How much memory a rank of a run has, on this machine or on one that is declared."""

from __future__ import annotations

import math

import psutil

from batchscape.plan.machine import Machine
from batchscape.record.spec import RunSpec

__all__ = ["room_gib"]

_GIB = 2**30


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
        return psutil.virtual_memory().total / _GIB / ranks if limit is None else limit
    sharing = math.ceil(ranks / max(1, machine.devices("cuda")))
    sizes = [device.memory_gib for device in machine.cuda_devices if device.memory_gib is not None]
    whole = min(sizes, default=None) if limit is None else limit
    return None if whole is None else whole / sharing
