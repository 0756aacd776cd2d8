"""The average of the weights against an explicit weighted sum over all weights there were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchscape.train.averaging import WeightAverage

tokens = st.integers(1, 10_000)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()


def walk(module: nn.Module, generator: torch.Generator) -> list[np.ndarray]:
    """Change every parameter, as an optimizer step would."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return values(module)


def values(module: nn.Module) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in module.parameters()]


@given(st.lists(tokens, min_size=1, max_size=12), st.floats(1, 1e6), st.integers(0, 2**31))
def test_it_is_the_weighted_sum_of_all_weights(
    steps: list[int], half_life: float, seed: int
) -> None:
    module, generator = model(), torch.Generator().manual_seed(seed)
    average = WeightAverage(module, half_life)
    stored = []
    for count in steps:
        stored.append(walk(module, generator))
        average.update(count)
    tokens_after = np.cumsum(steps)
    # What a step stands for, in a past that counts half every half-life.
    weights = 2.0 ** (-(tokens_after[-1] - tokens_after) / half_life) - 2.0 ** (
        -(tokens_after[-1] - np.concatenate([[0], tokens_after[:-1]])) / half_life
    )
    weights = np.array(weights) / np.sum(weights)
    expected = [np.tensordot(weights, np.stack(each), 1) for each in zip(*stored, strict=True)]
    with average.applied():
        for mine, reference in zip(values(module), expected, strict=True):
            np.testing.assert_allclose(mine, reference, rtol=1e-6, atol=1e-9)


def test_the_initial_weights_have_no_part_and_before_a_step_there_is_no_average() -> None:
    module = model()
    average = WeightAverage(module, 1e9)
    before = values(module)
    with average.applied():
        assert all((a == b).all() for a, b in zip(values(module), before, strict=True))
    after = walk(module, torch.Generator().manual_seed(1))
    average.update(1)
    with average.applied():
        assert all((a == b).all() for a, b in zip(values(module), after, strict=True))


def test_trained_weights_come_back_untouched_even_after_an_error() -> None:
    module, generator = model(), torch.Generator().manual_seed(2)
    average = WeightAverage(module, 10.0)
    for _ in range(3):
        trained = walk(module, generator)
        average.update(7)
    pointers = [parameter.data_ptr() for parameter in module.parameters()]

    def fail() -> None:
        with average.applied():
            assert any((a != b).any() for a, b in zip(values(module), trained, strict=True))
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert all((a == b).all() for a, b in zip(values(module), trained, strict=True))
    assert pointers == [parameter.data_ptr() for parameter in module.parameters()]


def test_buffers_and_frozen_parameters_are_those_of_the_model() -> None:
    module = model()
    module[0].bias.requires_grad_(False)
    average = WeightAverage(module, 10.0)
    average.update(5)
    module(torch.ones(4, 3, dtype=torch.float64))
    running = module[1].running_mean.clone()
    with average.applied():
        assert (module[1].running_mean == running).all()
    assert len(average.state()["average"]) == 3
