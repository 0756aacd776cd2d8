"""The time of an optimizer step and of its parts, without making the device wait."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch

__all__ = ["CpuClock", "CudaClock", "StepClock", "StepTimes", "build_clock"]


class StepTimes(NamedTuple):
    """Seconds of one optimizer step, on one rank."""

    step_time_s: float
    """The whole step."""
    data_s: float
    """Fetching samples, on the host."""
    forward_backward_s: float
    """Up to the last local gradient; on the CPU, where the host does both, data excluded."""
    exchange_optimizer_s: float
    """After the last local gradient: exchange that backward did not hide, clipping, update."""


class StepClock(Protocol):
    """Marks the edges of a step; the times are read later."""

    def begin(self) -> None:
        """Start a step."""

    def add_data(self, seconds: float) -> None:
        """Count host time spent on samples in this step."""

    def gradients_ready(self) -> None:
        """Mark that the last local gradient of the step is there."""

    def end(self) -> None:
        """End the step."""

    def read(self, count: int) -> list[StepTimes]:
        """Return the times of the oldest `count` steps that were not read yet."""


class CpuClock:
    """Wall clock: on the CPU the host does the work itself."""

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []
        self._begin = self._ready = self._data_s = 0.0

    def begin(self) -> None:
        """Start a step."""
        self._data_s = 0.0
        self._begin = self._ready = time.perf_counter()

    def add_data(self, seconds: float) -> None:
        """Count host time spent on samples in this step."""
        self._data_s += seconds

    def gradients_ready(self) -> None:
        """Mark that the last local gradient of the step is there."""
        self._ready = time.perf_counter()

    def end(self) -> None:
        """End the step."""
        end = time.perf_counter()
        self._steps.append(
            StepTimes(
                step_time_s=end - self._begin,
                data_s=self._data_s,
                forward_backward_s=self._ready - self._begin - self._data_s,
                exchange_optimizer_s=end - self._ready,
            )
        )

    def read(self, count: int) -> list[StepTimes]:
        """Return the times of the oldest `count` steps that were not read yet."""
        taken, self._steps = self._steps[:count], self._steps[count:]
        return taken


class CudaClock:
    """CUDA events on the current stream; reading waits only for the steps it reads.

    The host fetches samples while the device computes, so `data_s` is host time that
    `forward_backward_s` may contain or hide.
    """

    def __init__(self) -> None:
        self._open: list[torch.cuda.Event] = []
        self._steps: list[tuple[list[torch.cuda.Event], float]] = []
        self._data_s = 0.0

    def begin(self) -> None:
        """Start a step."""
        self._data_s = 0.0
        self._open = []
        self._mark()

    def add_data(self, seconds: float) -> None:
        """Count host time spent on samples in this step."""
        self._data_s += seconds

    def gradients_ready(self) -> None:
        """Mark that the last local gradient of the step is there."""
        self._mark()

    def end(self) -> None:
        """End the step."""
        self._mark()
        self._steps.append((self._open, self._data_s))

    def read(self, count: int) -> list[StepTimes]:
        """Return the times of the oldest `count` steps that were not read yet."""
        taken, self._steps = self._steps[:count], self._steps[count:]
        times = []
        for (begin, ready, end), data_s in taken:
            end.synchronize()
            times.append(
                StepTimes(
                    step_time_s=begin.elapsed_time(end) / 1e3,
                    data_s=data_s,
                    forward_backward_s=begin.elapsed_time(ready) / 1e3,
                    exchange_optimizer_s=ready.elapsed_time(end) / 1e3,
                )
            )
        return times

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._open.append(event)


def build_clock(device: torch.device) -> StepClock:
    """Return the clock that suits a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()
