"""The driver's view of a CUDA device, through NVML."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

__all__ = ["ask_driver"]

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
        device (MIG), on some systems.
    """
    import pynvml  # only where there is a CUDA device to ask about

    # CUDA_VISIBLE_DEVICES renumbers the devices for torch, and not for NVML.
    handle = _handle(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    if handle is None:
        return None
    try:
        return question(pynvml, handle)
    except pynvml.NVMLError:
        return None


@cache
def _handle(uuid: str) -> Any:  # noqa: ANN401  (pynvml has no types)
    """Return the handle of a device; None, and never asked again, where there is none to have."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None
