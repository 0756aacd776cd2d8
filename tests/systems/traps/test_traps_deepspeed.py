"""Traps of DeepSpeed: omitted numbers, its own accumulation, a bound that nobody asked for."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.systems

ROUNDING = 1e-5
"""Trained in float32."""


def test_an_omitted_accumulation_is_floored_and_then_refused(found):
    it = found("deepspeed", 1)
    assert "18 != 4 * 4 * 1" in it["18 by 4"]["refused"]
    assert it["16 by 4"]["gradient_accumulation_steps"] == 4


def test_a_global_batch_alone_becomes_one_micro_step(found):
    assert found("deepspeed", 1)["18 alone"] == {
        "train_batch_size": 18,
        "train_micro_batch_size_per_gpu": 18,
        "gradient_accumulation_steps": 1,
    }


def test_deepspeed_takes_the_mean_of_means(found):
    it = found("deepspeed", 1)
    assert it["mean of means"]["from mean of means"] < ROUNDING
    assert it["mean of means"]["error"] == pytest.approx(0.0381, abs=5e-5)
    assert it["right"]["error"] < ROUNDING


def test_deepspeed_clips_at_one_unless_told_not_to(found):
    it = found("deepspeed", 1)
    assert it["norm"] == pytest.approx(4.218, abs=5e-4)
    assert it["norm by default"] == pytest.approx(1.0, rel=1e-4)
    assert it["norm told not to clip"] == pytest.approx(it["norm"], rel=1e-4)
