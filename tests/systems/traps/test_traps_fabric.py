"""Traps of Lightning Fabric: it neither weights by labels nor divides by the accumulation."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.systems

ROUNDING = 1e-6
"""Fabric hands its callers float32."""


def test_fabric_takes_the_mean_of_means(found):
    it = found("fabric", 2)
    assert it["mean of means"]["from mean of means"] < ROUNDING
    assert it["mean of means"]["error"] == pytest.approx(0.0381, abs=5e-5)
    assert it["right"]["error"] < ROUNDING


def test_fabric_does_not_divide_by_the_accumulation(found):
    it = found("fabric", 2)
    away = it["accumulation"] - 1
    assert it["not divided"]["from mean of means"] == pytest.approx(away, abs=1e-5)


def test_fabric_clips_the_whole_gradient_after_the_last_micro_step(found):
    assert found("fabric", 2)["clipped once"]["error"] < 1e-5
