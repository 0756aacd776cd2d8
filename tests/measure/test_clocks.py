"""Clocks are those that the system tells, or missing."""

from __future__ import annotations

import psutil
import pytest
import torch

from batchscape.measure.clocks import device_clock


def test_cpu_clock_is_that_of_the_system():
    found = device_clock(torch.device("cpu"))
    told = psutil.cpu_freq()
    assert found.throttled is None
    if told is None:
        assert found.clock_mhz is None
    else:
        # Clocks move between two looks.
        assert found.clock_mhz == pytest.approx(told.current, rel=0.9)


@pytest.mark.gpu
def test_cuda_clock_is_told():
    found = device_clock(torch.device("cuda", 0))
    assert found.clock_mhz is None or 100 < found.clock_mhz < 5000
    assert found.throttled in {None, True, False}
