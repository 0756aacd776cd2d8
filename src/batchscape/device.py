"""Operations on a device that a processor needs none of, by torch, for devices of any kind.

The launcher imports no torch, except one built for other devices than those of CUDA: its view of
devices is `cuda_devices.py`.

Notes
-----
Source: https://docs.pytorch.org/docs/stable/accelerator.html, since torch 2.9; events, random
states and names are of the module that `torch.get_device_module` returns, for CUDA `torch.cuda`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from batchscape import cuda_devices

T = TypeVar("T")


def is_accelerator(device: torch.device) -> bool:
    """Whether a device computes beside the host, with a memory of its own."""
    return device.type != "cpu"


def is_accelerator_here() -> bool:
    """Whether torch finds a device of the kind that it is built for."""
    return torch.accelerator.is_available()


def module_of(device: torch.device) -> Any:  # noqa: ANN401  (a module)
    """Return torch's module of a kind of device, as `torch.cuda`: its events, streams, names."""
    return torch.get_device_module(device)


def device_of_rank(device_type: str, rank_on_node: int, devices: int) -> torch.device:
    """Return the device of a rank, which becomes the current one; ranks take devices in turn."""
    device = torch.device(device_type)
    if not is_accelerator(device):
        return device
    device = torch.device(device_type, rank_on_node % devices)
    module_of(device).set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has computed; a processor has already."""
    if is_accelerator(device):
        module_of(device).synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Let the device's allocator give back memory that no tensor needs."""
    if is_accelerator(device):
        module_of(device).empty_cache()


def ask_driver(device: torch.device, question: Callable[[Any, Any], T]) -> T | None:
    """Ask NVML about a CUDA device of torch, as `cuda_devices.ask_driver`."""
    with suppress(Exception):
        return cuda_devices.ask_driver(_uuid(device), question)
    return None


def processes_on(device: torch.device) -> list[Any] | None:
    """Return the processes that compute on a CUDA device, as `cuda_devices.processes_on`."""
    with suppress(Exception):
        return cuda_devices.processes_on(_uuid(device))
    return None


def foreign_processes(device: torch.device, ranks_on_node: int) -> int | None:
    """Count the processes on a CUDA device that are no ranks of this run; None: not known.

    The driver knows no namespaces of processes: in a container it numbers them as the host does.
    Where it lists this process, those outside of its process group are foreign, and a run is one
    process group. Where it does not, the numbers differ, and foreign are all processes above the
    ranks of this run on the device. Source, of numbers of the host in containers:
    https://github.com/NVIDIA/nvidia-docker/issues/1483.
    """
    processes = processes_on(device)
    if processes is None:
        return None
    listed = {process.pid for process in processes}
    if os.getpid() in listed:
        return sum(not _is_of_this_run(pid) for pid in listed)
    ranks = len(range(device.index, ranks_on_node, module_of(device).device_count()))
    return len(listed) - ranks if len(listed) >= ranks else None


def _uuid(device: torch.device) -> str:
    # CUDA_VISIBLE_DEVICES renumbers the devices for torch, and not for NVML.
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _is_of_this_run(pid: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(pid) == os.getpgrp()
    return False  # of another namespace, or just ended
