"""Traps of `transformers.Trainer`: who divides by the global count of labels, and who does not."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.systems

ROUNDING = 1e-6
"""Losses of `transformers` are computed in float32, whatever the model."""


def test_the_default_divides_by_the_global_count(found):
    assert found("trainer", 2)["default"]["error"] < ROUNDING


def test_without_the_average_across_devices_each_rank_divides_by_its_own_count(found):
    it = found("trainer", 2)["each rank by itself"]
    assert it["error"] == pytest.approx(0.0919, abs=5e-5)
    # Neither the whole nor the mean of means over micro-steps.
    assert it["from mean of means"] > 0.05


def test_a_model_without_kwargs_gets_the_mean_of_means(found):
    it = found("trainer", 2)["model without kwargs"]
    assert it["from mean of means"] < ROUNDING
    assert it["error"] == pytest.approx(0.1366, abs=5e-5)


def test_an_old_compute_loss_multiplies_the_gradient_by_the_accumulation(found):
    it = found("trainer", 2)
    # k times the mean of means is k - 1 of its norms away from it.
    away = it["accumulation"] - 1
    assert it["own compute_loss"]["from mean of means"] == pytest.approx(away, abs=1e-5)
    assert it["own compute_loss"]["error"] > 0.9 * away


def test_the_last_optimizer_step_of_an_epoch_is_of_what_is_left(found):
    """An epoch is a global batch of eight and one micro-batch of two a rank: samples of a rank."""
    assert found("trainer", 2)["windows"] == [4, 2, 4, 2]
