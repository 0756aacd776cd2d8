"""Sketches of gradients against an independent implementation, and against exact distances."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchscape.measure import gradient_sketch as module
from batchscape.measure.gradient_sketch import BUCKETS, gradient_sketch

MASK = 0xFFFFFFFF


def mix(x):
    """lowbias32, in Python's own integers."""
    x = ((x ^ x >> 16) * 0x7FEB352D) & MASK
    x = ((x ^ x >> 15) * 0x846CA68B) & MASK
    return x ^ x >> 16


def plain(values):
    """The definition, element by element."""
    sketch = np.zeros(BUCKETS)
    for place, value in enumerate(values):
        hashed = mix((place & MASK) ^ mix((place >> 32) + 0x9E3779B9))
        sketch[hashed % BUCKETS] += value * (1 if hashed >> 31 else -1)
    return sketch


def with_gradients(*gradients):
    return [SimpleNamespace(grad=g, numel=g.numel) for g in gradients]


def test_the_definition(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=generator).double() for shape in ((70, 3), (5,), ())]
    monkeypatch.setattr(module, "_CHUNK", 64)
    values = torch.cat([part.reshape(-1) for part in parts]).numpy()
    np.testing.assert_allclose(gradient_sketch(with_gradients(*parts)).numpy(), plain(values))


def test_a_device_is_given_few_large_parts(monkeypatch):
    """Of GPT-2's table of words: 38,597,376 elements, which were 589 parts of 2^16."""
    parts = []
    monkeypatch.setattr(module, "_add", lambda _sketch, part, _place: parts.append(len(part)))
    gradient = torch.empty(50257 * 768, device="meta")
    with pytest.raises(NotImplementedError, match="meta"):  # nothing to copy to the host
        gradient_sketch(with_gradients(gradient))
    assert (len(parts), sum(parts)) == (37, 50257 * 768)


@given(place=st.integers(0, 2**62))
def test_hashes_of_any_place(place):
    hash_of_place = int(module._hash(torch.tensor([place]))[0])
    assert hash_of_place == mix((place & MASK) ^ mix((place >> 32) + 0x9E3779B9))


def test_a_missing_gradient_counts_as_zero_and_holds_its_place():
    a, b = (nn.Parameter(torch.zeros(100)) for _ in range(2))
    b.grad = torch.ones(100)
    zeros = torch.zeros(100)
    expected = gradient_sketch(with_gradients(zeros, torch.ones(100)))
    assert torch.equal(gradient_sketch([a, b]), expected)
    assert gradient_sketch([a]).tolist() == [0.0] * BUCKETS


def test_the_scale_is_divided_out():
    g = torch.randn(5000, generator=torch.Generator().manual_seed(1)).double()
    scaled = gradient_sketch(with_gradients(1024 * g), torch.tensor(1024.0))
    torch.testing.assert_close(scaled, gradient_sketch(with_gradients(g)))


def test_the_gradient_itself_is_left_alone():
    gradient = torch.arange(1.0, 1001.0).double()
    before = gradient.clone()
    gradient_sketch(with_gradients(gradient))
    assert torch.equal(gradient, before)


def test_what_is_not_finite_stays_so():
    assert not gradient_sketch(with_gradients(torch.tensor([1.0, torch.inf]))).isfinite().all()


def test_layout_in_memory_does_not_count():
    g = torch.arange(600.0).reshape(20, 30)
    assert torch.equal(
        gradient_sketch(with_gradients(g)),
        gradient_sketch(with_gradients(g.t().contiguous().t())),
    )


@pytest.mark.parametrize("concentrated", [False, True])
def test_norms_are_unbiased_with_the_stated_spread(concentrated):
    rng = np.random.default_rng(2)
    errors = []
    for _ in range(300):
        values = rng.normal(size=20_000)
        if concentrated:
            values *= np.exp(3 * rng.normal(size=20_000))
        sketch = gradient_sketch(with_gradients(torch.from_numpy(values)))
        errors.append(float(sketch.square().sum()) / (values**2).sum() - 1)
    spread = np.sqrt(2 / BUCKETS)
    assert abs(np.mean(errors)) < 4 * spread / np.sqrt(300)
    assert np.std(errors) < 1.15 * spread
    assert concentrated or np.std(errors) > 0.85 * spread


@pytest.mark.gpu
def test_devices_agree():
    generator = torch.Generator().manual_seed(4)
    g = torch.randn(300_000, generator=generator)
    torch.testing.assert_close(
        gradient_sketch(with_gradients(g.cuda())),
        gradient_sketch(with_gradients(g)),
        rtol=0,
        atol=1e-10,
    )
