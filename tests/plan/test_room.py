"""The range of a predicted peak, against what was measured on a device."""

from dataclasses import replace

import pytest

from batchscape.cuda_devices import CudaDevice
from batchscape.measure.memory_report import MemoryReport
from batchscape.plan import room
from batchscape.plan.machine import Machine
from batchscape.plan.room import memory_forecast, room_gib

H200 = Machine(16, "a CPU", (CudaDevice(0, "NVIDIA H200", (9, 0), "GPU-0", 139.8),))
WORKSPACES = 64 / 1024
MEASURED = [(15.998, 15.977), (15.992, 15.968), (8.921, 8.900), (2.556, 2.519)]
"""Peaks of GPT-2 124M less cuBLAS's workspaces, and their predictions, in GiB: docs/gpu.md."""


def forecast(spec_of, predicted, machine=H200, measured=None):
    spec = replace(spec_of((1, 16, 1)), device_type="cuda")
    predicted_memory = memory_forecast(
        spec, MemoryReport("fake tensors", peak_allocated_gib=predicted), machine, measured
    )
    assert predicted_memory.peak_allocated_gib is not None
    peak = predicted_memory.peak_allocated_gib
    return peak.low, peak.high, str(predicted_memory.fits)


@pytest.mark.parametrize(("measured", "predicted"), MEASURED)
def test_the_range_holds_what_was_measured_and_is_no_wider_than_a_quarter(
    spec_of, measured, predicted
):
    low, high, _ = forecast(spec_of, predicted)
    assert low < measured + WORKSPACES < high
    assert (low, high) == pytest.approx((0.9 * predicted, 1.1 * predicted + 0.125))
    assert high - low < 0.25 * predicted


@pytest.mark.parametrize(
    ("predicted", "verdict"),
    [(100.0, "fits"), (120.0, "unsure"), (155.0, "unsure"), (156.0, "does not fit")],
)
def test_what_takes_a_tenth_more_than_there_is_does_not_fit(spec_of, predicted, verdict):
    """139.8 GiB: 0.9 times 155.3 is as much."""
    assert forecast(spec_of, predicted)[2] == verdict


def test_what_was_learned_has_the_workspaces_in_it(spec_of):
    low, high, _ = forecast(spec_of, 10.0, measured=(0.98, 1.02, 3))
    assert (low, high) == pytest.approx((9.0, 10.2))


def test_ranks_on_cores_share_the_memory_and_each_has_the_limit_that_is_emulated(
    spec_of, monkeypatch
):
    monkeypatch.setattr(room, "_host_gib", lambda: 24.0)
    cpu = Machine(2, "a CPU", ())
    assert [room_gib(spec_of((ranks, 8, 1)), cpu) for ranks in (1, 2, 4)] == [24.0, 12.0, 6.0]
    limited = [spec_of((ranks, 8, 1), device={"memory_limit_gib": 0.3}) for ranks in (1, 4)]
    assert [room_gib(spec, cpu) for spec in limited] == [0.3, 0.3]
