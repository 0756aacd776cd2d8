"""The driver's view of a CUDA device, through NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["ask_driver"]

T = TypeVar("T")


def ask_driver(device: torch.device, question: Callable[[Any, Any], T]) -> T | None:
    """Ask NVML about a device of torch.

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

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        pynvml.nvmlInit()
        try:
            # CUDA_VISIBLE_DEVICES renumbers the devices for torch, and not for NVML.
            return question(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
