"""How fast the device of a rank is clocked, and whether it holds itself back."""

from __future__ import annotations

from typing import Any, NamedTuple

import psutil
import torch

from batchscape.measure.nvml import ask_driver

__all__ = ["DeviceClock", "device_clock"]

_HARMLESS = ("GpuIdle", "ApplicationsClocksSetting", "UserDefinedClocks", "DisplayClockSetting")
"""Reasons for a lower clock that somebody chose, or that only tell of rest."""


class DeviceClock(NamedTuple):
    """Clock of a device at one moment; None where it does not tell."""

    clock_mhz: float | None
    """Of the streaming multiprocessors, or mean over the CPU's cores."""
    throttled: bool | None
    """Whether heat or power hold the clock down; CUDA only."""


def device_clock(device: torch.device) -> DeviceClock:
    """Read the clock of a device now.

    Notes
    -----
    Source: `nvmlDeviceGetClockInfo`, `nvmlDeviceGetCurrentClocksEventReasons`, NVML API reference,
    https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html; `psutil.cpu_freq`.
    """
    if device.type == "cuda":
        return ask_driver(device, _cuda_clock) or DeviceClock(None, None)
    frequency = psutil.cpu_freq()
    return DeviceClock(frequency.current if frequency else None, None)


def _cuda_clock(nvml: Any, handle: Any) -> DeviceClock:  # noqa: ANN401  (pynvml has no types)
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    for name in _HARMLESS:
        reasons &= ~getattr(nvml, f"nvmlClocksEventReason{name}", 0)
    clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    return DeviceClock(float(clock), bool(reasons))
