"""Scaling rules by their laws: identity at the reference, and what each rule holds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.config import AdamW, Muon, Scaling, Sgd
from batchscape.errors import ConfigError
from batchscape.plan.stages import scale_optimizer

ADAMW = AdamW(name="adamw", learning_rate=3e-4, beta1=0.9, beta2=0.95, weight_decay=0.1)
MUON = Muon(name="muon", learning_rate=0.02, adamw_learning_rate=3e-4, weight_decay=0.1)
SGD = Sgd(name="sgd", learning_rate=0.1, momentum=0.9, weight_decay=1e-4)

batches = st.integers(1, 4096)
rates = st.sampled_from(["none", "linear", "sqrt"])
betas = st.sampled_from(["none", "half_life"])
decays = st.sampled_from(["none", "timescale"])


def rules(reference, rate, beta, decay):
    active = {rate, beta, decay} != {"none"}
    settings = {"learning_rate": rate, "betas": beta, "weight_decay": decay}
    return Scaling(reference if active else None, **settings)


@given(batches, rates, betas, decays, st.sampled_from([ADAMW, MUON]))
def test_the_reference_batch_keeps_its_settings(batch, rate, beta, decay, optimizer):
    assert scale_optimizer(optimizer, rules(batch, rate, beta, decay), batch) == optimizer


@given(batches, batches)
def test_learning_rates(reference, batch):
    k = batch / reference
    for rate, factor in (("linear", k), ("sqrt", math.sqrt(k))):
        rule = rules(reference, rate, "none", "none")
        for optimizer in (ADAMW, SGD, MUON):
            result = scale_optimizer(optimizer, rule, batch)
            assert result.learning_rate == pytest.approx(optimizer.learning_rate * factor)
            assert result.weight_decay == optimizer.weight_decay
        muon = scale_optimizer(MUON, rule, batch)
        assert muon.adamw_learning_rate == pytest.approx(MUON.adamw_learning_rate * factor)


@given(st.integers(1, 512), st.integers(1, 512))
def test_half_lives_of_betas_are_held_in_samples(reference, batch):
    """Samples until a weight is half: batch x ln(1/2) / ln(beta)."""
    for optimizer in (ADAMW, MUON):
        result = scale_optimizer(optimizer, rules(reference, "none", "half_life", "none"), batch)
        assert not isinstance(result, Sgd)
        for name in ("beta1", "beta2"):
            before = reference / math.log(getattr(optimizer, name))
            after = getattr(result, name)
            if after > 1e-300:
                assert batch / math.log(after) == pytest.approx(before, rel=1e-6)


def test_a_published_beta():
    """0.95 at a batch of 512 is 0.9999 at a batch of 1 (Marek et al. 2025, arXiv 2507.07101)."""
    result = scale_optimizer(ADAMW, rules(512, "none", "half_life", "none"), 1)
    assert result.beta2 == pytest.approx(0.9999, abs=5e-6)


@given(batches, batches, rates)
def test_the_timescale_of_weight_decay_is_held(reference, batch, rate):
    for optimizer in (ADAMW, SGD, MUON):
        result = scale_optimizer(optimizer, rules(reference, rate, "none", "timescale"), batch)
        before = reference / (optimizer.learning_rate * optimizer.weight_decay)
        after = batch / (result.learning_rate * result.weight_decay)
        assert after == pytest.approx(before, rel=1e-9)


def test_momentum_is_no_beta():
    rule = rules(32, "sqrt", "half_life", "timescale")
    assert getattr(scale_optimizer(MUON, rule, 128), "momentum", None) == MUON.momentum
    with pytest.raises(ConfigError, match=r"Adam's betas, and optimizer=sgd has none; use"):
        scale_optimizer(SGD, rules(32, "none", "half_life", "none"), 32)


def test_settings_that_no_optimizer_can_have_are_refused():
    extreme = AdamW(name="adamw", learning_rate=1e308)
    with pytest.raises(ConfigError, match=r"32 to 64 makes optimizer\.learning_rate inf"):
        scale_optimizer(extreme, rules(32, "linear", "none", "none"), 64)
