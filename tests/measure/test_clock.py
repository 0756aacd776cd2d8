"""Times of steps against sleeps of known length and against one another."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchscape.measure import clock as clock_module
from batchscape.measure.clock import CpuClock, DeviceClock, build_clock


class Time:
    """A clock on the wall that is moved by hand."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def wall(monkeypatch):
    moved = Time()
    monkeypatch.setattr(clock_module, "time", moved)
    return moved


def step(clock, wall, *, data, forward_backward, hidden, exchange, optimizer, exchanges=True):
    """Do one step whose parts take known times; `hidden` is exchanged under the backward."""
    clock.begin()
    wall.now += data
    clock.add_data(data)
    wall.now += forward_backward - hidden
    if exchanges:
        clock.exchange_begins()
    wall.now += hidden
    clock.gradients_ready()
    wall.now += exchange
    if exchanges:
        clock.exchange_ends()
    wall.now += optimizer
    clock.end()


PARTS = st.fixed_dictionaries(
    {
        name: st.floats(0, 10).map(lambda s: round(s, 3))
        for name in ("data", "forward_backward", "exchange", "optimizer")
    }
)


@given(steps=st.lists(st.tuples(PARTS, st.floats(0, 1), st.booleans()), min_size=1, max_size=5))
def test_parts_are_those_that_were_spent(steps):
    moved = Time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock_module, "time", moved)
        clock = CpuClock()
        for parts, share, exchanges in steps:
            hidden = share * parts["forward_backward"]
            step(clock, moved, **parts, hidden=hidden, exchanges=exchanges)
        measured = clock.read(len(steps))
    for times, (parts, share, exchanges) in zip(measured, steps, strict=True):
        hidden = share * parts["forward_backward"]
        exchange = parts["exchange"] if exchanges else 0.0
        rest = 0.0 if exchanges else parts["exchange"]
        assert times._asdict() == pytest.approx(
            {
                "step_time_s": sum(parts.values()),
                "data_s": parts["data"],
                "forward_backward_s": parts["forward_backward"],
                "exchange_s": exchange,
                "optimizer_s": parts["optimizer"] + rest,
                "exchange_span_s": hidden + exchange if exchanges else 0.0,
                "gap_s": None if times is measured[0] else 0.0,
            },
            abs=1e-9,
        )


def test_a_rank_that_trains_alone_exchanges_for_no_time(wall):
    clock = CpuClock()
    durations = {"data": 1, "forward_backward": 2, "hidden": 0, "exchange": 0, "optimizer": 3}
    step(clock, wall, **durations, exchanges=False)
    (times,) = clock.read(1)
    assert (times.exchange_s, times.exchange_span_s) == (0.0, 0.0)


def test_an_exchange_says_nothing_of_the_next_step(wall):
    clock = CpuClock()
    durations = {"data": 1, "forward_backward": 2, "hidden": 1, "exchange": 4, "optimizer": 3}
    step(clock, wall, **durations)
    step(clock, wall, **{**durations, "exchange": 0}, exchanges=False)
    assert [times.exchange_s for times in clock.read(2)] == [4.0, 0.0]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_pause_belongs_to_no_part(wall, exchanges):
    clock = CpuClock()
    durations = {"data": 1, "forward_backward": 2, "hidden": 1, "exchange": 4, "optimizer": 3}
    step(clock, wall, **durations, exchanges=exchanges)
    clock.begin()
    wall.now += 1
    clock.add_data(1)
    wall.now += 1
    if exchanges:
        clock.exchange_begins()
    wall.now += 1
    clock.gradients_ready()
    wall.now += 4
    if exchanges:
        clock.exchange_ends()
    clock.pause()
    wall.now += 50
    clock.resume()
    wall.now += 3
    clock.end()
    without, paused = clock.read(2)
    assert paused._replace(gap_s=None) == without


def test_gaps_are_between_steps_and_hold_nothing_that_was_broken_off(wall):
    """Gaps and steps together are the time on the wall."""
    clock = CpuClock()
    durations = {"data": 1, "forward_backward": 2, "hidden": 1, "exchange": 4, "optimizer": 3}
    began = wall.now
    for gap in (0.25, 0.5, 4.0):
        step(clock, wall, **durations)
        wall.now += gap
    on_the_wall = wall.now - began
    clock.break_off()
    wall.now += 100  # an evaluation
    for _ in range(2):
        step(clock, wall, **durations)
        wall.now += 8
    times = clock.read(5)
    assert [each.gap_s for each in times] == [None, 0.25, 0.5, None, 8]
    assert sum(each.step_time_s + (each.gap_s or 0) for each in times[:3]) == on_the_wall - 4


def test_steps_are_read_oldest_first_and_once(wall):
    clock = CpuClock()
    durations = {"data": 0, "hidden": 0, "exchange": 0, "optimizer": 0}
    for seconds in (1, 2, 3):
        step(clock, wall, **durations, forward_backward=seconds)
    assert [times.step_time_s for times in clock.read(2)] == [1, 2]
    assert [times.step_time_s for times in clock.read(2)] == [3]
    assert clock.read(1) == []


def test_the_wall_clock_runs():
    """The only look at real time: it passes, and the parts are the whole."""
    import torch

    clock = build_clock(torch.device("cpu"))
    clock.begin()
    time.sleep(0.02)
    clock.gradients_ready()
    clock.end()
    (times,) = clock.read(1)
    assert times.forward_backward_s >= 0.02
    assert times.forward_backward_s + times.optimizer_s == pytest.approx(times.step_time_s)


class Event:
    """A CUDA event that remembers the stream it was recorded on, at a time of that stream."""

    def __init__(self, *, enable_timing):
        assert enable_timing
        self.at_ms = None

    def record(self, stream):
        self.at_ms = stream.now_ms

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


class Stream:
    def __init__(self, now_ms):
        self.now_ms = now_ms


def test_marks_made_on_an_exchanges_own_stream_are_those_of_the_computation(monkeypatch):
    """A sharding engine exchanges on a stream of its own, behind its earlier exchanges."""
    computing, exchanging = Stream(0.0), Stream(0.0)
    current = [computing]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    clock = DeviceClock(torch.device("cuda"))
    clock.begin()
    computing.now_ms, exchanging.now_ms, current[0] = 4.0, 5.0, exchanging
    clock.exchange_begins()
    computing.now_ms, exchanging.now_ms = 10.0, 25.0
    clock.gradients_ready()
    current[0], computing.now_ms = computing, 30.0
    clock.exchange_ends()
    computing.now_ms = 32.0
    clock.end()
    computing.now_ms = 39.0  # the host works, and nothing is there to compute
    clock.begin()
    computing.now_ms = 40.0
    clock.gradients_ready()
    clock.end()
    clock.break_off()
    clock.begin()
    clock.gradients_ready()
    clock.end()
    times, following, after = clock.read(3)
    assert [each.gap_s for each in (times, following, after)] == [None, pytest.approx(7e-3), None]
    assert times.forward_backward_s == pytest.approx(10e-3)
    assert times.exchange_s == pytest.approx(20e-3)
    assert times.exchange_span_s == pytest.approx(26e-3)
    assert times.optimizer_s == pytest.approx(2e-3)
