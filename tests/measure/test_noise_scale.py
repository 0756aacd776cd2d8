"""Norms of micro-gradients as hooks see them, against gradients taken one by one."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchscape.geometry import BatchGeometry
from batchscape.measure.noise_scale import GradientSquares, is_sampled, small_batch_size
from unwaiting import no_waiting


class Tied(nn.Module):
    """One matrix used twice, a bias, and a parameter that does not train."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 4))
        self.bias = nn.Parameter(torch.randn(6))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, inputs):
        hidden = torch.tanh(inputs @ self.matrix)
        return ((hidden @ self.matrix.T + self.bias) * self.frozen).square().sum()


@pytest.fixture
def tied():
    torch.manual_seed(0)
    return Tied().double()


def backward(module, inputs):
    module(inputs).backward()


def test_every_backward_pass_counts_apart(tied):
    """Against torch.autograd.grad: squares of single gradients, not of the accumulated one."""
    micro_batches = torch.randn(5, 3, 6, dtype=torch.float64)
    parameters = [tied.matrix, tied.bias]
    expected = sum(
        gradient.square().sum()
        for inputs in micro_batches
        for gradient in torch.autograd.grad(tied(inputs), parameters)
    )
    with GradientSquares(tied) as squares:
        for inputs in micro_batches:
            backward(tied, inputs)
    total = squares.square_sum(1.0)
    assert total.dtype == torch.float64
    assert total.ndim == 0
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    accumulated = sum(p.grad.square().sum() for p in parameters)
    assert accumulated > 1.5 * total, "accumulated gradients would have passed"


def test_nothing_is_counted_outside_or_twice(tied):
    inputs = torch.randn(3, 6, dtype=torch.float64)
    with GradientSquares(tied) as squares:
        backward(tied, inputs)
    once = squares.square_sum(1.0).item()
    backward(tied, inputs)
    assert squares.square_sum(1.0).item() == once
    with GradientSquares(tied) as again:
        backward(tied, inputs)
    assert again.square_sum(1.0).item() == once


def test_hooks_go_when_a_step_fails(tied):
    def fail():
        with GradientSquares(tied):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not tied.matrix._backward_hooks


def test_gradients_are_as_without_and_not_copied(tied):
    """Autograd takes a gradient over only where nobody else holds it."""
    inputs = torch.randn(3, 6, dtype=torch.float64)
    backward(tied, inputs)
    plain = tied.matrix.grad.clone()
    tied.zero_grad(set_to_none=True)
    gradients = []
    with GradientSquares(tied):
        handle = tied.bias.register_hook(lambda gradient: gradients.append(gradient.data_ptr()))
        backward(tied, inputs)
        handle.remove()
    assert torch.equal(tied.matrix.grad, plain)
    assert gradients == [tied.bias.grad.data_ptr()]


@pytest.mark.parametrize("scale", [2.0**16, torch.tensor(2.0**16)], ids=["number", "tensor"])
def test_the_scale_of_the_loss_is_undone(tied, scale):
    inputs = torch.randn(3, 6, dtype=torch.float64)
    with GradientSquares(tied) as squares:
        backward(tied, inputs)
        plain = squares.square_sum(1.0)
    with GradientSquares(tied) as scaled:
        (tied(inputs) * float(scale)).backward()
    assert scaled.square_sum(scale) == plain


def test_micro_steps_leave_no_tensors_behind(tied):
    """Small tensors among those that a step frees keep the C library from reusing their place."""
    inputs = torch.randn(3, 6, dtype=torch.float64)

    def tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    with GradientSquares(tied) as squares:
        backward(tied, inputs)
        after_one, square = tensors(), squares.square_sum(1.0).item()
        for _ in range(20):
            tied.zero_grad()
            backward(tied, inputs)
        assert tensors() == after_one
    assert squares.square_sum(1.0).item() == pytest.approx(21 * square)


def test_many_tensors_do_not_lose_the_small_ones():
    """A float32 sum of squares forgets tensors that are small beside one."""
    sizes = [1.0] + [1e-4] * 4000
    parameters = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in sizes)
    with GradientSquares(parameters) as squares:
        (torch.cat(list(parameters)) * torch.tensor(sizes)).sum().backward()
    exact = sum(size**2 for size in sizes)
    assert squares.square_sum(1.0).item() == pytest.approx(exact, rel=1e-7)
    naive = torch.zeros(())
    for parameter in parameters:
        naive += parameter.grad.square().sum()
    assert abs(naive.item() / exact - 1) > 1e-5


def test_a_gradient_that_is_not_finite_shows():
    weight = nn.Parameter(torch.zeros(2))
    with GradientSquares(nn.ParameterList([weight])) as squares:
        (weight * torch.tensor([1.0, float("inf")])).sum().backward()
    assert not torch.isfinite(squares.square_sum(1.0))


def test_steps_are_sampled_at_the_end_of_each_interval():
    assert [k for k in range(12) if is_sampled(k, 4)] == [3, 7, 11]
    assert all(is_sampled(k, 1) for k in range(5))
    assert not any(is_sampled(k, None) for k in range(5))


@pytest.mark.parametrize(
    ("geometry", "small"),
    [
        ((2, 8, 1), 8),
        ((1, 8, 2), 8),
        ((2, 1, 2), 1),
        ((2, 11, 1), 11),
        ((1, 8, 1), 4),
        ((1, 9, 1), 3),
        ((1, 35, 1), 7),
        ((1, 7, 1), 1),
        ((1, 2, 1), 1),
        ((1, 1, 1), None),
        ((1, 11, 1), None),
    ],
    ids=str,
)
def test_small_batches(geometry, small):
    ranks, micro, accumulation = geometry
    assert small_batch_size(BatchGeometry(1, ranks, micro, accumulation)) == small


@given(st.integers(1, 4), st.integers(1, 400), st.integers(1, 4))
def test_small_batches_are_equal_parts_of_the_global_batch(ranks, micro, accumulation):
    geometry = BatchGeometry(1, ranks, micro, accumulation)
    small = small_batch_size(geometry)
    if small is not None:
        assert geometry.global_batch_size % small == 0
        assert small < geometry.global_batch_size
        assert small <= micro <= 7 * small
    else:
        assert ranks == accumulation == 1
        assert all(micro % parts for parts in range(2, 8))


@pytest.mark.gpu
def test_cuda_agrees_with_the_cpu_and_the_host_does_not_wait():
    torch.manual_seed(0)
    module = Tied()
    inputs = torch.randn(3, 6)
    totals = []
    for device in ("cpu", "cuda"):
        moved = module.to(device)
        moved.zero_grad(set_to_none=True)
        on_device = inputs.to(device)
        with GradientSquares(moved) as squares:
            backward(moved, on_device)  # the first call may set up libraries, and wait
        with no_waiting() if device == "cuda" else nullcontext():
            with squares:
                backward(moved, on_device)
            total = squares.square_sum(1.0)
        totals.append(total.item())
    assert totals[1] == pytest.approx(totals[0], rel=1e-5)
