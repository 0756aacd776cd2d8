"""How long a queue takes: against a plain simulation on numbered devices, and by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchscape.launch.schedule import makespan_s


def simulated_s(runs: list[tuple[int, float]], devices: int, at_once: int) -> float:
    """Each run takes the devices that are free first, no earlier than the run before it."""
    free, slots, begin = [0.0] * devices, [0.0] * at_once, 0.0
    for ranks, seconds in runs:
        free.sort()
        slots.sort()
        width = min(ranks, devices)
        begin = max(begin, free[width - 1], slots[0])
        free[:width] = [begin + seconds] * width
        slots[0] = begin + seconds
    return max(free)


RUNS = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0.5, 1.0, 3.0]) | st.floats(0.01, 100)),
    min_size=1,
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(RUNS, st.integers(1, 8), st.integers(1, 6))
def test_a_strict_queue_is_simulated(
    runs: list[tuple[int, float]], devices: int, at_once: int
) -> None:
    total_s = makespan_s(runs, devices, at_once)
    assert total_s == pytest.approx(simulated_s(runs, devices, at_once))
    work_s = sum(min(ranks, devices) * seconds for ranks, seconds in runs) / devices
    assert total_s >= max(work_s, *(seconds for _, seconds in runs)) * (1 - 1e-9)
    if at_once == 1:
        assert total_s == pytest.approx(math.fsum(seconds for _, seconds in runs))


def test_equal_runs_go_in_waves() -> None:
    """Seven runs of two devices of eight: four, then three."""
    assert makespan_s([(2, 5.0)] * 7, 8, 10) == 10
    assert makespan_s([(2, 5.0)] * 7, 8, 10, runs_per_device=2) == 5
    assert makespan_s([(8, 1.0), (4, 2.0), (4, 2.0)], 8, 9) == 3


def test_nothing_starts_past_the_head_of_the_queue() -> None:
    """The narrow run would fit beside the first one, and waits for the wide one."""
    assert makespan_s([(4, 10.0), (8, 1.0), (1, 5.0)], 8, 9) == 16
