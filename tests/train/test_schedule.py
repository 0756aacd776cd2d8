"""The learning rate against PyTorch's own schedulers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR

from batchscape.config import Constant, Cosine
from batchscape.train.schedule import learning_rate_at, midpoint


def test_cosine_equals_torch_at_every_sample():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    reference = CosineAnnealingLR(optimizer, T_max=200, eta_min=0.05)
    schedule = Cosine(name="cosine", warmup_samples=40, final_fraction=0.1)
    for samples in range(200):
        expected = reference.get_last_lr()[0]
        assert learning_rate_at(schedule, 0.5, 40 + samples, 240) == pytest.approx(
            expected, abs=1e-9
        )
        optimizer.step()
        reference.step()
    assert learning_rate_at(schedule, 0.5, 10_000, 240) == 0.05


def test_warm_up_is_linear_then_constant():
    schedule = Constant(name="constant", warmup_samples=100)
    rates = [learning_rate_at(schedule, 2.0, s, 1000) for s in (0, 25, 50, 100, 700)]
    assert rates == [0.0, 0.5, 1.0, 2.0, 2.0]


@given(st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_mean_learning_rate_does_not_depend_on_the_batch(batch):
    """The midpoint rule integrates a linear warm-up exactly, whatever the global batch."""
    schedule = Constant(name="constant", warmup_samples=320)
    steps = [learning_rate_at(schedule, 1.0, midpoint(k, batch), 640) for k in range(640 // batch)]
    assert np.mean(steps) == pytest.approx(0.75, rel=1e-12)
    assert steps[0] > 0
