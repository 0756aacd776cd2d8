"""What the device of a rank draws and how fast it is clocked, while the training goes on.

Samples are taken between steps, at most once a second and in at most a thousandth of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import psutil
import torch

from batchscape.device import ask_driver, foreign_processes, synchronize

__all__ = [
    "CpuTelemetry",
    "CudaTelemetry",
    "DeviceSample",
    "DeviceTotals",
    "Telemetry",
    "build_telemetry",
]

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
_INTEGRAL = "sampled power, integrated"


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
    """Where that comes from: a counter of the device, or an integral over samples."""
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


class Telemetry(Protocol):
    """Follows the device of one rank."""

    def sample(self) -> DeviceSample | None:
        """Return how the device is now; None where the last look was too short a time ago."""

    def resume(self) -> None:
        """Count energy from now on; may be called again while it is counted."""

    def pause(self) -> None:
        """Count no more energy: what follows is no measured optimizer step."""

    def totals(self) -> DeviceTotals:
        """Take a last sample and return what was found."""


class CpuTelemetry:
    """Clock of the cores, as the system tells it.

    Notes
    -----
    Source: `psutil.cpu_freq`, https://psutil.readthedocs.io/en/latest/#psutil.cpu_freq.
    """

    def __init__(self) -> None:
        self._pace = _LookTimer()

    def sample(self) -> DeviceSample | None:
        """See `Telemetry`."""
        return self._pace.take(lambda: DeviceSample(None, _cpu_clock_mhz()))

    def resume(self) -> None:
        """See `Telemetry`; a processor tells no energy without privileges."""

    def pause(self) -> None:
        """See `Telemetry`."""

    def totals(self) -> DeviceTotals:
        """See `Telemetry`."""
        return DeviceTotals(None, None, _cpu_clock_mhz(), None, None, None, None)


class CudaTelemetry:
    """Power, clock, throttling, energy and company of a CUDA device, through NVML.

    Energy is read off the device's counter, which is there since Volta, else integrated over the
    samples of its power by the trapezoidal rule.

    Parameters
    ----------
    device : torch.device
        Of this rank, with an index.
    counts_energy : bool
        Whether the energy of the device is this rank's to report: ranks that share a device
        would count it again and again.
    ranks_on_node : int
        Ranks of the run on this machine.

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
        self._device = device
        self._ranks_on_node = ranks_on_node
        self._pace = _LookTimer()
        self._is_timed = False
        self._forget()
        self._energy: _Energy | None = None
        if counts_energy:
            has_counter = self._counted() is not None
            self._energy = _Energy(self._counted if has_counter else _Integral(self._power_w).read)
            self._source = _COUNTER if has_counter else _INTEGRAL

    def sample(self) -> DeviceSample | None:
        """See `Telemetry`."""
        return self._pace.take(self._look)

    def resume(self) -> None:
        """See `Telemetry`; what the warm-up met is forgotten, as its times are."""
        if not self._is_timed:
            self._is_timed = True
            self._forget()
            self._look()
        if self._energy is not None and not self._energy.running:
            # What was asked of the device before must not be done on the measured steps' account.
            synchronize(self._device)
            self._energy.resume()

    def pause(self) -> None:
        """See `Telemetry`."""
        if self._energy is not None and self._energy.running:
            synchronize(self._device)
            self._energy.pause()

    def totals(self) -> DeviceTotals:
        """See `Telemetry`."""
        last = self._look()
        self.pause()
        energy_j = None if self._energy is None else self._energy.told_j
        source = None if energy_j is None else self._source
        return DeviceTotals(
            energy_j,
            source,
            last.clock_mhz,
            self._has_seen(_THROTTLE),
            self._has_seen(_POWER_CAP),
            "; ".join(self._limits) or None,
            self._foreign_processes,
        )

    def _forget(self) -> None:
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
        if self._energy is not None:
            self._energy.touch()
        foreign = foreign_processes(self._device, self._ranks_on_node)
        if foreign is not None:
            self._foreign_processes = max(foreign, self._foreign_processes or 0)
        clock = self._ask(lambda nvml, h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM))
        if (power_limit := self._ask(_power_limit)) is not None:
            self._limits[power_limit] = None
        if reasons == _CLOCKS_SETTING and self._is_below_defaults(clock):
            self._limits[_CLOCKS_SET] = None
        return DeviceSample(self._power_w(), None if clock is None else float(clock))

    def _is_below_defaults(self, clock: int | None) -> bool:
        """Whether a clock that a setting holds down is not that which the device has by default."""
        clocks = (self._ask(_default_clock), self._ask(_highest_clock))
        return clock is not None and clock not in clocks

    def _power_w(self) -> float | None:
        milliwatts = self._ask(lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle))
        return None if milliwatts is None else milliwatts / 1e3

    def _counted(self) -> float | None:
        return ask_driver(self._device, _counted_j)

    def _ask(self, question: Callable[[Any, Any], Any]) -> Any:  # noqa: ANN401  (NVML's own)
        return ask_driver(self._device, question)


class _LookTimer:
    """Says when a look at the device is due."""

    def __init__(self) -> None:
        self._next = time.monotonic()

    def take(self, look: Callable[[], DeviceSample]) -> DeviceSample | None:
        began = time.monotonic()
        if began < self._next:
            return None
        sample = look()
        took = time.monotonic() - began
        self._next = began + max(_LEAST_INTERVAL_S, took / _LARGEST_SHARE)
        return sample


class _Energy:
    """Adds up what a meter runs through between `resume` and `pause`."""

    def __init__(self, read: Callable[[], float | None]) -> None:
        self.running = False
        self._joules = 0.0
        self._seconds = 0.0
        self._read = read
        self._resumed = 0.0
        self._began: float | None = None
        self._has_failed = False

    @property
    def told_j(self) -> float | None:
        """What was counted; None where that was too short, or the meter failed on the way."""
        return None if self._has_failed or self._seconds < _LEAST_ENERGY_S else self._joules

    def resume(self) -> None:
        self.running = True
        self._resumed = time.monotonic()
        self._began = self._read()

    def touch(self) -> None:
        """Let the meter see the present, where it has to look on."""
        self._read()

    def pause(self) -> None:
        self.running = False
        ended = self._read()
        self._seconds += time.monotonic() - self._resumed
        if ended is None or self._began is None:
            self._has_failed = True
        else:
            self._joules += ended - self._began


class _Integral:
    """Energy from power, by the trapezoidal rule over the times at which it is read."""

    def __init__(self, power_w: Callable[[], float | None]) -> None:
        self._power_w = power_w
        self._joules = 0.0
        self._last: tuple[float, float] | None = None

    def read(self) -> float | None:
        """Return the energy since the first reading, in joules; None without a power."""
        now, power = time.monotonic(), self._power_w()
        if power is None:
            return None
        if self._last is not None:
            at, before = self._last
            self._joules += (now - at) * (power + before) / 2
        self._last = (now, power)
        return self._joules


def _power_limit(nvml: Any, handle: Any) -> str | None:  # noqa: ANN401
    limit = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1e3
    default = nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1e3
    return f"power limit {limit:g} W of {default:g} W" if limit < default else None


def _default_clock(nvml: Any, handle: Any) -> int:  # noqa: ANN401
    return int(nvml.nvmlDeviceGetDefaultApplicationsClock(handle, nvml.NVML_CLOCK_SM))


def _highest_clock(nvml: Any, handle: Any) -> int:  # noqa: ANN401
    return int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))


def _counted_j(nvml: Any, handle: Any) -> float:  # noqa: ANN401  (pynvml has no types)
    return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3


def _cpu_clock_mhz() -> float | None:
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        return None
    return frequency.current if frequency else None


def build_telemetry(device: torch.device, rank_on_node: int, ranks_on_node: int) -> Telemetry:
    """Return the telemetry that suits the device of a rank.

    Parameters
    ----------
    device : torch.device
    rank_on_node : int
        Among the ranks of this machine; the first one on a CUDA device has its number.
    ranks_on_node : int
        Ranks of the run on this machine.
    """
    if device.type == "cuda":
        is_first = rank_on_node == device.index
        return CudaTelemetry(device, counts_energy=is_first, ranks_on_node=ranks_on_node)
    return CpuTelemetry()
