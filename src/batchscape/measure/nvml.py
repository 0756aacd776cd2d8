"""The driver's view of a CUDA device, through NVML."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import torch

__all__ = ["ask_driver", "foreign_processes"]

T = TypeVar("T")


def ask_driver(device: torch.device, question: Callable[[Any, Any], T]) -> T | None:
    """Ask NVML about a device of torch.

    The library is opened at the first question of a process and stays open until its end, so
    that a question costs no more than the driver's answer.

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    question : callable
        Of the `pynvml` module and the device's handle.

    Returns
    -------
    object or None
        The answer; None where the driver does not tell: without permission, in slices of a
        device (MIG), on some systems, and where the bindings or the driver are too old or too new
        to know the question. What is not told ends no run.
    """
    with suppress(Exception):
        import pynvml  # only where there is a CUDA device to ask about

        # CUDA_VISIBLE_DEVICES renumbers the devices for torch, and not for NVML.
        handle = _handle(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return None if handle is None else question(pynvml, handle)
    return None


def foreign_processes(device: torch.device, ranks_on_node: int) -> int | None:
    """Count the processes that compute on a device and are no ranks of this run.

    The driver knows no namespaces of processes: in a container it numbers them as the host does.
    Where it lists this process, those outside of its process group are foreign, and a run is one
    process group. Where it does not, they have other numbers, and foreign is what there is more
    than ranks of this run on the device.

    Parameters
    ----------
    device : torch.device
        With an index.
    ranks_on_node : int
        Ranks of this run on this machine, dealt to the visible devices in turn.

    Returns
    -------
    int or None
        None where the driver does not tell, or lists fewer processes than there are ranks.

    Notes
    -----
    Sources: `nvmlDeviceGetComputeRunningProcesses`, NVML API reference,
    https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html; numbers of the host in
    containers: https://github.com/NVIDIA/nvidia-docker/issues/1483.
    """
    processes = ask_driver(
        device, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    )
    if processes is None:
        return None
    listed = {process.pid for process in processes}
    if os.getpid() in listed:
        return sum(not _is_of_this_run(pid) for pid in listed)
    ranks = len(range(device.index, ranks_on_node, torch.cuda.device_count()))
    return len(listed) - ranks if len(listed) >= ranks else None


def _is_of_this_run(pid: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(pid) == os.getpgrp()
    return False  # of another namespace, or just ended


@cache
def _handle(uuid: str) -> Any:  # noqa: ANN401  (pynvml has no types)
    """Return the handle of a device; None, and never asked again, where there is none to have."""
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    return None
