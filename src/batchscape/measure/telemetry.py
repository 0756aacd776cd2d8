"""Power, clock and throttling of the device of a rank, during the training.

Samples are taken between steps, at most once a second and in at most a thousandth of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import torch

from batchscape.device import ask_driver, foreign_processes, synchronize

_LEAST_INTERVAL_S = 1.0
_LARGEST_SHARE = 1e-3
"""Part of the time that samples may take: on some machines a look at all clocks takes long."""

_POWER_CAP = 0x04
"""The board draws what it may: how a device under a full load is meant to run."""
_THROTTLE = 0x08 | 0x20 | 0x40 | 0x80
"""Reasons for a lower clock that nobody chose: hardware slowdown, thermal slowdown by software and
by hardware, power brake. Source of both: `nvmlClocksEventReason*` in nvml.h,
https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html."""
_CLOCKS_SETTING = 0x02
"""Clocks that somebody set, or on some devices the clocks that they have by default."""

_CLOCKS_SET = "clocks held down by a setting"

_LEAST_ENERGY_S = 2.0
"""Time below which no energy is told. Power is a mean over up to a second, and the counter moves in
steps of up to a tenth of one: Yang et al., "Part-time Power Measurements", arXiv:2312.02741."""

_COUNTER = "the device's energy counter"


class DeviceSample(NamedTuple):
    """A device at one moment; None where it does not tell."""

    power_w: float | None
    """Board power, in watts; CUDA only."""
    clock_mhz: float | None
    """Of the streaming multiprocessors, or mean over the CPU's cores."""


class DeviceTotals(NamedTuple):
    """What a rank leaves about its device; None where it does not tell."""

    energy_j: float | None
    """Energy in measured optimizer steps; CUDA only, and of the device's first rank only."""
    energy_source: str | None
    """Where that comes from: a counter of the device."""
    clock_mhz: float | None
    """At the end, right after the last step."""
    throttled: bool | None
    """Whether heat or the hardware's protection held the clock down at any sample; CUDA only."""
    power_capped: bool | None
    """Whether the power limit of the board held the clock down at any sample; CUDA only."""
    device_limits: str | None
    """What somebody set the device below its defaults, power limit and clocks; CUDA only."""
    foreign_processes: int | None
    """Processes that are no ranks of the run and computed on the device, the most of any sample;
    CUDA only."""


class CpuTelemetry:
    """Clock of the cores, as the system reports it: all that is known of a processor.

    Notes
    -----
    Source: `psutil.cpu_freq`, https://psutil.readthedocs.io/en/latest/#psutil.cpu_freq.
    """

    def __init__(self) -> None:
        self._next = time.monotonic()

    def sample(self) -> DeviceSample | None:
        """Return how the device is now; None where the last look was too short a time ago."""
        began = time.monotonic()
        if began < self._next:
            return None
        sample = self._look()
        took = time.monotonic() - began
        self._next = began + max(_LEAST_INTERVAL_S, took / _LARGEST_SHARE)
        return sample

    def resume(self) -> None:
        """Count energy from now on; may be called again while it is counted."""

    def pause(self) -> None:
        """Count no more energy: what follows is no measured optimizer step."""

    def totals(self) -> DeviceTotals:
        """Take a last sample and return what was found."""
        return DeviceTotals(None, None, self._look().clock_mhz, None, None, None, None)

    def _look(self) -> DeviceSample:
        try:
            frequency = psutil.cpu_freq()
        except (OSError, NotImplementedError):
            frequency = None
        return DeviceSample(None, frequency.current if frequency else None)


class CudaTelemetry(CpuTelemetry):
    """Power, clock, throttling, energy and company of a CUDA device, through NVML.

    Energy is read off the device's counter, which is there since Volta.

    Notes
    -----
    Source: `nvmlDeviceGetPowerUsage`, `nvmlDeviceGetTotalEnergyConsumption`,
    `nvmlDeviceGetClockInfo`, `nvmlDeviceGetCurrentClocksThrottleReasons`,
    `nvmlDeviceGetPowerManagementLimit` and `nvmlDeviceGetPowerManagementDefaultLimit`,
    `nvmlDeviceGetDefaultApplicationsClock`, `nvmlDeviceGetMaxClockInfo`, NVML API reference,
    https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html. Power is a mean over
    one second on Ampere and later, except on GA100. No question tells of locked clocks; the reason
    for the clock does, while the device is at work.
    """

    def __init__(self, device: torch.device, *, counts_energy: bool, ranks_on_node: int) -> None:
        super().__init__()
        self._device = device
        self._ranks_on_node = ranks_on_node
        self._is_timed = False
        self._reset_observations()
        self._counts_energy = counts_energy
        self._resumed: tuple[float, float | None] | None = None
        """When energy was counted from, and what the counter said; None while it is not."""
        self._seconds = 0.0
        self._joules: float | None = 0.0

    def resume(self) -> None:
        """See `CpuTelemetry`; what the warm-up met is forgotten, as its times are."""
        if not self._is_timed:
            self._is_timed = True
            self._reset_observations()
            self._look()
        if self._counts_energy and self._resumed is None:
            # What was asked of the device before must not be done on the measured steps' account.
            synchronize(self._device)
            self._resumed = time.monotonic(), ask_driver(self._device, _counted_j)

    def pause(self) -> None:
        """See `CpuTelemetry`."""
        if self._resumed is None:
            return
        synchronize(self._device)
        (since, before), ended = self._resumed, ask_driver(self._device, _counted_j)
        self._resumed = None
        self._seconds += time.monotonic() - since
        if ended is None or before is None or self._joules is None:
            self._joules = None  # the counter failed on the way
        else:
            self._joules += ended - before

    def totals(self) -> DeviceTotals:
        """See `CpuTelemetry`."""
        last = self._look()
        self.pause()
        energy_j = self._joules if self._seconds >= _LEAST_ENERGY_S else None
        return DeviceTotals(
            energy_j,
            None if energy_j is None else _COUNTER,
            last.clock_mhz,
            self._has_seen(_THROTTLE),
            self._has_seen(_POWER_CAP),
            "; ".join(self._limits) or None,
            self._foreign_processes,
        )

    def _reset_observations(self) -> None:
        self._reasons: int | None = None
        self._foreign_processes: int | None = None
        self._limits: dict[str, None] = {}
        """In the order in which they were met."""

    def _has_seen(self, reasons: int) -> bool | None:
        return None if self._reasons is None else bool(self._reasons & reasons)

    def _look(self) -> DeviceSample:
        reasons = self._ask(lambda nvml, h: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(h))
        if reasons is not None:
            self._reasons = (self._reasons or 0) | int(reasons)
        foreign = foreign_processes(self._device, self._ranks_on_node)
        if foreign is not None:
            self._foreign_processes = max(foreign, self._foreign_processes or 0)
        clock = self._ask(lambda nvml, h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM))
        if (power_limit := self._ask(_power_limit)) is not None:
            self._limits[power_limit] = None
        if reasons == _CLOCKS_SETTING and clock is not None:
            default = self._ask(
                lambda n, h: n.nvmlDeviceGetDefaultApplicationsClock(h, n.NVML_CLOCK_SM)
            )
            highest = self._ask(lambda n, h: n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM))
            if clock not in {default, highest}:
                self._limits[_CLOCKS_SET] = None
        milliwatts = self._ask(lambda nvml, h: nvml.nvmlDeviceGetPowerUsage(h))
        power_w = None if milliwatts is None else milliwatts / 1e3
        return DeviceSample(power_w, None if clock is None else float(clock))

    def _ask(self, question: Callable[[Any, Any], Any]) -> Any:  # noqa: ANN401  (NVML's own)
        return ask_driver(self._device, question)


def _power_limit(nvml: Any, handle: Any) -> str | None:  # noqa: ANN401
    limit = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3
    default = nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1e3
    return f"power limit {limit:g} W of {default:g} W" if limit < default else None


def _counted_j(nvml: Any, handle: Any) -> float:  # noqa: ANN401  (pynvml has no types)
    return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3


def build_telemetry(device: torch.device, rank_on_node: int, ranks_on_node: int) -> CpuTelemetry:
    """Return the telemetry that suits the device of a rank."""
    if device.type == "cuda":
        is_first = rank_on_node == device.index
        return CudaTelemetry(device, counts_energy=is_first, ranks_on_node=ranks_on_node)
    return CpuTelemetry()
