"""What makes decompositions train unlike one another is found, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from batchscape.errors import ConfigError
from batchscape.models.build import build_model
from batchscape.models.invariance import PROBED_SAMPLES, why_not_invariant

GPT = {"name": "gpt", "n_layers": 2, "n_heads": 2, "d_model": 32}


@pytest.fixture(autouse=True)
def _own_models(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "faults")
    yield
    sys.modules.pop("own_models", None)


@pytest.fixture
def batch():
    tokens = torch.randint(256, (PROBED_SAMPLES, 33), generator=torch.manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture
def build(config_of, text):
    def build(model, precision="float32"):
        if isinstance(model, str):
            model = {"name": "custom", "_target_": f"own_models.{model}"}
        return build_model(config_of(model=model), text, precision)

    return build


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("model", [GPT, "Bigram"], ids=["gpt", "custom"])
def test_sums_over_samples_are_invariant(build, batch, model, precision):
    assert why_not_invariant(build(model, precision), batch) is None


def test_uneven_labels_are_no_reason(build, batch):
    inputs, labels = batch[0], batch[1].clone()
    labels[0, 3:] = -100
    labels[1] = -100
    assert why_not_invariant(build(GPT), (inputs, labels)) is None


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("Normalised", "batch normalisation: model.norm"),
        ("Dropping", "dropout or other randomness"),
        ("Contrastive", "loss not additive over samples"),
    ],
    ids=["normalised", "dropping", "contrastive"],
)
def test_reasons_are_named(build, batch, model, reason):
    assert str(why_not_invariant(build(model), batch)).startswith(reason)


def test_dropout_alone_is_one_reason(build, batch):
    reason = why_not_invariant(build(GPT | {"dropout": 0.1}), batch)
    assert reason == "dropout: model.dropout, p=0.1"


def test_dropout_hides_no_other_reason(build, batch):
    module = build("DroppingContrastive")
    reason = why_not_invariant(module, batch)
    assert reason == "dropout: model.dropout, p=0.3; loss not additive over samples"
    assert module.model.dropout.training


def in_place(model, tokens):
    model.centre.lerp_(tokens.float().mean(), 0.1)


def by_assignment(model, tokens):
    model.centre = model.centre * 0.9 + tokens.float().mean() * 0.1


@pytest.mark.parametrize("update", [in_place, by_assignment])
@pytest.mark.parametrize("name", [True, False])
def test_a_buffer_that_changes_in_forward_is_named(build, batch, update, name):
    module = build("Bigram")
    module.model.register_buffer("still", torch.tensor(float("nan")))
    module.model.register_buffer("centre", torch.tensor(1.0))
    plain = module.model.forward

    def forward(tokens):
        update(module.model, tokens)
        return plain(tokens) * (module.model.centre if name else 1)

    module.model.forward = forward
    centre = module.model.centre
    assert why_not_invariant(module, batch) == "buffers change in forward: model.centre"
    assert module.model.centre is centre
    assert centre == 1


def test_batch_normalisation_is_named_once(build, batch):
    reason = why_not_invariant(build("Normalised"), batch)
    assert reason == "batch normalisation: model.norm"


def test_batch_normalisation_that_is_frozen_is_none(build, batch):
    module = build("Normalised")
    module.model.norm.eval()
    assert why_not_invariant(module, batch) is None


def test_a_mean_is_refused(build, batch):
    with pytest.raises(ConfigError, match=r"is a mean.*must be the sum.*reduction='sum'"):
        why_not_invariant(build("MeanLoss"), batch)


def test_a_mean_is_refused_behind_dropout_and_normalisation(build, batch):
    module = build("MeanLoss")
    module.model.tokens = nn.Sequential(module.model.tokens, nn.Dropout(0.3))
    with pytest.raises(ConfigError, match="is a mean"):
        why_not_invariant(module, batch)


def test_a_part_that_does_not_grow_with_the_batch_is_found(build, batch):
    """A penalty inside the loss counts once a micro-step, so more often with accumulation."""
    module = build("Bigram")
    plain = module.forward

    def forward(inputs, labels):
        loss, right = plain(inputs, labels)
        return loss + 0.1 * module.model.head.weight.square().sum(), right

    module.forward = forward
    assert why_not_invariant(module, batch) == "loss not additive over samples"


def test_losses_that_are_not_finite_are_left_to_the_training(build, batch):
    module = build(GPT)
    with torch.no_grad():
        module.model.norm.weight.fill_(float("nan"))
    assert why_not_invariant(module, batch) is None


@pytest.mark.parametrize("model", [GPT | {"dropout": 0.1}, "Normalised", "Dropping"], ids=str)
def test_nothing_is_disturbed(build, batch, model):
    module = build(model)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    rng, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    why_not_invariant(module, batch)
    assert torch.equal(rng, torch.get_rng_state())
    assert torch.get_float32_matmul_precision() == precision
    assert all(torch.equal(state[name], t) for name, t in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.training


@pytest.mark.gpu
@pytest.mark.parametrize("model", [GPT, "Bigram", "Contrastive"], ids=str)
def test_a_device_gives_the_same_answer(build, batch, model):
    """Where the training's products are in TF32 too: the check's are not."""
    on_cpu = why_not_invariant(build(model), batch)
    on_device = build(model).to("cuda")
    rng = torch.cuda.get_rng_state()
    torch.set_float32_matmul_precision("high")
    try:
        assert why_not_invariant(on_device, tuple(part.cuda() for part in batch)) == on_cpu
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(rng, torch.cuda.get_rng_state())
