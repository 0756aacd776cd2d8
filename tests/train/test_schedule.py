"""The learning rate against PyTorch's own schedulers and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from batchscape.config import AdamW, Constant, Cosine, WarmupStableDecay
from batchscape.geometry import BatchGeometry
from batchscape.record.spec import Stage
from batchscape.train.timeline import Timeline, schedule_factor

ADAMW = AdamW(name="adamw", learning_rate=0.1)


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)


def test_cosine_equals_torch_at_every_sample():
    stepped = optimizer()
    reference = CosineAnnealingLR(stepped, T_max=200, eta_min=0.05)
    schedule = Cosine(name="cosine", warmup_samples=40, final_fraction=0.1)
    for samples in range(200):
        expected = reference.get_last_lr()[0]
        assert 0.5 * schedule_factor(schedule, 40 + samples, 240) == pytest.approx(
            expected, abs=1e-9
        )
        stepped.step()
        reference.step()
    assert schedule_factor(schedule, 10_000, 240) == 0.1


def test_warm_up_is_linear_then_constant():
    schedule = Constant(name="constant", warmup_samples=100)
    factors = [schedule_factor(schedule, s, 1000) for s in (0, 25, 50, 100, 700)]
    assert factors == [0.0, 0.25, 0.5, 1.0, 1.0]


def test_linear_decay_equals_torch_at_every_sample():
    stepped = optimizer()
    reference = LinearLR(stepped, start_factor=1.0, end_factor=0.2, total_iters=80)
    schedule = WarmupStableDecay(name="wsd", decay_samples=80, final_fraction=0.2)
    for samples in range(80):
        expected = reference.get_last_lr()[0] / 0.5
        assert schedule_factor(schedule, 120 + samples, 200) == pytest.approx(expected, abs=1e-9)
        stepped.step()
        reference.step()


@given(
    st.integers(1, 1000),
    st.integers(0, 1000),
    st.integers(0, 1000),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_decay_by_a_root_in_closed_form(decay, warmup, stable, final, t):
    """At a share t of the decay, 1 - sqrt(t) of the way down from the peak is left to go."""
    budget = warmup + stable + decay
    shape = {"name": "wsd", "warmup_samples": warmup, "decay_samples": decay, "shape": "sqrt"}
    schedule = WarmupStableDecay(**shape, final_fraction=final)
    factor = schedule_factor(schedule, budget - decay + t * decay, budget)
    # Near the begin of the decay a root magnifies the rounding of the position.
    assert factor == pytest.approx(final + (1 - final) * (1 - math.sqrt(t)), abs=1e-6)
    if stable:
        assert schedule_factor(schedule, warmup + stable / 2, budget) == 1.0
    if warmup:
        assert schedule_factor(schedule, warmup / 4, budget) == 0.25
    assert schedule_factor(schedule, budget, budget) == pytest.approx(final)
    assert schedule_factor(schedule, budget + 5, budget) == pytest.approx(final)


@given(st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_mean_learning_rate_does_not_depend_on_the_batch(batch):
    """The midpoint rule integrates lines exactly, whatever the global batch."""
    timeline = Timeline([Stage(640, BatchGeometry(1, 1, batch, 1), ADAMW)])
    for schedule, mean in (
        (Constant(name="constant", warmup_samples=320), 0.75),
        (WarmupStableDecay(name="wsd", warmup_samples=320, decay_samples=160), 0.625),
    ):
        steps = [
            schedule_factor(schedule, timeline.step(k).midpoint, 640) for k in range(640 // batch)
        ]
        assert np.mean(steps) == pytest.approx(mean, rel=1e-12)
        assert steps[0] > 0
