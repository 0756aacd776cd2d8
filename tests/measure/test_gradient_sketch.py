"""Sketches of gradients against an independent implementation, and against exact distances."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchscape.measure import gradient_sketch as module
from batchscape.measure.gradient_sketch import BUCKETS, gradient_sketch
from batchscape.models.build import build_model

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


def test_parts_change_no_digit(monkeypatch):
    gradient = torch.randn(3 * 2**16 + 5, generator=torch.Generator().manual_seed(1)).double()
    sketches = []
    for chunk in (2**16, 2**20):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        sketches.append(gradient_sketch(with_gradients(gradient)))
    assert torch.equal(*sketches)


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


def test_signs_and_buckets_are_even():
    hashed = module._hash(torch.arange(2**20)).numpy()
    counts = np.bincount(hashed % BUCKETS, minlength=BUCKETS)
    # 1024 elements a bucket: chi-squared with 1023 degrees of freedom, six deviations wide.
    assert abs(((counts - 1024) ** 2 / 1024).sum() - 1023) < 6 * np.sqrt(2 * 1023)
    assert abs((hashed >> 31).mean() - 0.5) < 6 * 0.5 / 2**10


def test_a_missing_gradient_counts_as_zero_and_holds_its_place():
    a, b = (nn.Parameter(torch.zeros(100)) for _ in range(2))
    b.grad = torch.ones(100)
    zeros = torch.zeros(100)
    expected = gradient_sketch(with_gradients(zeros, torch.ones(100)))
    assert torch.equal(gradient_sketch([a, b]), expected)
    assert gradient_sketch([a]).tolist() == [0.0] * BUCKETS


def test_it_is_linear_and_divides_the_scale_out():
    generator = torch.Generator().manual_seed(1)
    g, h = (torch.randn(5000, generator=generator).double() for _ in range(2))
    together = gradient_sketch(with_gradients(g - h))
    apart = gradient_sketch(with_gradients(g)) - gradient_sketch(with_gradients(h))
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)
    scaled = gradient_sketch(with_gradients(1024 * g), torch.tensor(1024.0))
    torch.testing.assert_close(scaled, gradient_sketch(with_gradients(g)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_itself_is_left_alone(dtype):
    gradient = torch.arange(1.0, 1001.0).to(dtype)
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


@pytest.mark.slow
def test_real_errors_of_rounding_against_exact_distances(spec_of):
    """Gradients of one model in float32, whole and in parts, against the same in float64."""
    spec = spec_of()
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 200, (16, 33), generator=generator)

    def gradient(precision, micro):
        model = build_model(spec.config, spec.data, precision)
        for part in tokens.split(micro):
            (model(part[:, :-1], part[:, 1:])[0] / tokens[:, 1:].numel()).backward()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double()
        return flat, gradient_sketch(model.parameters())

    exact, reference = gradient("float64", 16)
    for micro in (16, 4, 1):
        g, sketch = gradient("float32", micro)
        error = float((g - exact).norm() / exact.norm())
        assert 1e-8 < error < 1e-5
        estimated = float((sketch - reference).norm() / reference.norm())
        # Two norms with 2.2 % each; five deviations.
        assert estimated == pytest.approx(error, rel=5 * np.sqrt(2 * 0.022**2))


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
