"""The time of an optimizer step and of its parts, without making the device wait.

A step has up to five marks: its begin; the first bucket of gradients given to the exchange; the
last local gradient; the end of the exchange; its end. A rank that trains alone exchanges nothing:
its exchange takes no time.
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import torch

from batchscape.device import is_accelerator, module_of


class StepTimes(NamedTuple):
    """Seconds of one optimizer step, on one rank.

    On the CPU the step is the sum of data, forward and backward, exchange and optimizer; on a
    device the same without data, which the host fetches while the device computes.
    """

    step_time_s: float
    """The whole step."""
    data_s: float
    """Fetching samples, on the host."""
    forward_backward_s: float
    """Up to the last local gradient; on the CPU, where the host does both, data excluded."""
    exchange_s: float
    """From the last local gradient to the end of the exchange: what backward did not hide.

    An exchange ends on all ranks together, so that a rank which is early waits in it for the
    slowest. How much of it that is, one rank's times do not tell."""
    optimizer_s: float
    """After the exchange: clipping, update, averaging of weights."""
    exchange_span_s: float
    """From the first bucket given to the exchange to its end; backward goes on meanwhile."""
    gap_s: float | None
    """From the end of the step before to the begin of this one, which is in no step; None where
    `break_off` came between, and before the first step."""


class StepMarks(Protocol):
    """What an engine tells of a step while it happens."""

    def exchange_begins(self) -> None:
        """Mark that the first bucket of gradients is given to the exchange."""

    def gradients_ready(self) -> None:
        """Mark that the last local gradient of the step is there."""

    def exchange_ends(self) -> None:
        """Mark that the gradients of all ranks are there."""


class StepClock(StepMarks, Protocol):
    """Marks the edges of a step; the times are read later."""

    def begin(self) -> None:
        """Start a step."""

    def add_data(self, seconds: float) -> None:
        """Count host time spent on samples in this step."""

    def pause(self) -> None:
        """Stop the time of this step, after the exchange and once at most."""

    def resume(self) -> None:
        """Let it go on."""

    def end(self) -> None:
        """End the step."""

    def break_off(self) -> None:
        """Let what comes until the next step, as an evaluation, be no gap between steps."""

    def read(self, count: int) -> list[StepTimes]:
        """Return the times of the oldest `count` steps that were not read yet."""


class NoMarks:
    """Marks that nobody reads."""

    def exchange_begins(self) -> None:
        """See `StepMarks`."""

    def gradients_ready(self) -> None:
        """See `StepMarks`."""

    def exchange_ends(self) -> None:
        """See `StepMarks`."""


class CpuClock:
    """Wall clock: on the CPU the host does the work itself."""

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []
        self._data_s = self._begin = self._ready = self._paused = 0.0
        self._exchange: tuple[float, float] | None = None
        self._gap_s: float | None = None
        self._ended: float | None = None
        """When the step before ended; None where that is no begin of a gap."""

    def begin(self) -> None:
        """Start a step."""
        self._data_s = 0.0
        self._exchange = None
        self._begin = self._ready = time.perf_counter()
        self._gap_s = None if self._ended is None else self._begin - self._ended

    def add_data(self, seconds: float) -> None:
        """Count host time spent on samples in this step."""
        self._data_s += seconds

    def exchange_begins(self) -> None:
        """Mark that the first bucket of gradients is given to the exchange."""
        now = time.perf_counter()
        self._exchange = (now, now)

    def gradients_ready(self) -> None:
        """Mark that the last local gradient of the step is there."""
        self._ready = time.perf_counter()

    def exchange_ends(self) -> None:
        """Mark that the gradients of all ranks are there."""
        if self._exchange is not None:
            self._exchange = (self._exchange[0], time.perf_counter())

    def pause(self) -> None:
        """Stop the time of this step, after the exchange and once at most."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Let it go on: what came before moves on by as much as the pause took."""
        elapsed = time.perf_counter() - self._paused
        self._begin += elapsed
        self._ready += elapsed
        if self._exchange is not None:
            self._exchange = (self._exchange[0] + elapsed, self._exchange[1] + elapsed)

    def end(self) -> None:
        """End the step."""
        end = time.perf_counter()
        first, exchanged = self._exchange or (self._ready, self._ready)
        self._steps.append(
            StepTimes(
                step_time_s=end - self._begin,
                data_s=self._data_s,
                forward_backward_s=self._ready - self._begin - self._data_s,
                exchange_s=exchanged - self._ready,
                optimizer_s=end - exchanged,
                exchange_span_s=exchanged - first,
                gap_s=self._gap_s,
            )
        )
        self._ended = end

    def break_off(self) -> None:
        """Let what comes until the next step be no gap between steps."""
        self._ended = None

    def read(self, count: int) -> list[StepTimes]:
        """Return the times of the oldest `count` steps that were not read yet."""
        taken, self._steps = self._steps[:count], self._steps[count:]
        return taken


class DeviceClock:
    """Events on the stream of the device that computes; reading waits only for the steps it reads.

    The host fetches samples while the device computes, so `data_s` is host time that
    `forward_backward_s` may contain or hide. All marks are events of the stream that is current
    when the step begins, also those made while an engine works on a stream of its own, behind whose
    earlier exchanges a mark would wait. The end of the exchange is marked after the stream that
    computes was told to wait for it. A gap is time in which the device had no step to compute,
    because the host had not come so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = module_of(device)
        self._open: dict[str, torch.Event] = {}
        self._steps: list[tuple[dict[str, torch.Event], float]] = []
        self._data_s = 0.0
        self._ended: torch.Event | None = None
        """The end of the step before; None where that is no begin of a gap."""

    def begin(self) -> None:
        """Start a step."""
        self._data_s = 0.0
        self._open = {} if self._ended is None else {"before": self._ended}
        self._stream = self._module.current_stream()
        self._mark("begin")

    def add_data(self, seconds: float) -> None:
        """Count host time spent on samples in this step."""
        self._data_s += seconds

    def exchange_begins(self) -> None:
        """Mark that the first bucket of gradients is given to the exchange."""
        self._mark("first")

    def gradients_ready(self) -> None:
        """Mark that the last local gradient of the step is there."""
        self._mark("ready")

    def exchange_ends(self) -> None:
        """Mark that the gradients of all ranks are there."""
        self._mark("exchanged")

    def pause(self) -> None:
        """Stop the time of this step, after the exchange and once at most."""
        self._mark("pause")

    def resume(self) -> None:
        """Let it go on."""
        self._mark("resume")

    def end(self) -> None:
        """End the step."""
        self._mark("end")
        self._steps.append((self._open, self._data_s))
        self._ended = self._open["end"]

    def break_off(self) -> None:
        """Let what comes until the next step be no gap between steps."""
        self._ended = None

    def read(self, count: int) -> list[StepTimes]:
        """Return the times of the oldest `count` steps that were not read yet."""
        taken, self._steps = self._steps[:count], self._steps[count:]
        return [_times(events, data_s) for events, data_s in taken]

    def _mark(self, name: str) -> None:
        event = self._module.Event(enable_timing=True)
        event.record(self._stream)
        self._open[name] = event


def _times(events: dict[str, torch.Event], data_s: float) -> StepTimes:
    begin, ready, end = events["begin"], events["ready"], events["end"]
    end.synchronize()
    exchanged = events.get("exchanged", ready)
    paused_s = _seconds(events["pause"], events["resume"]) if "pause" in events else 0.0
    return StepTimes(
        step_time_s=_seconds(begin, end) - paused_s,
        data_s=data_s,
        forward_backward_s=_seconds(begin, ready),
        exchange_s=_seconds(ready, exchanged),
        optimizer_s=_seconds(exchanged, end) - paused_s,
        exchange_span_s=_seconds(events.get("first", exchanged), exchanged),
        gap_s=_seconds(events["before"], begin) if "before" in events else None,
    )


def _seconds(first: torch.Event, second: torch.Event) -> float:
    return 0.0 if first is second else first.elapsed_time(second) / 1e3


def build_clock(device: torch.device) -> StepClock:
    """Return the clock that suits a device."""
    return DeviceClock(device) if is_accelerator(device) else CpuClock()
