"""The user's own modules: what is given to them, taken from them, and refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from batchscape.errors import ConfigError
from batchscape.models.build import build_model


@pytest.fixture(autouse=True)
def _own_models(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "faults")
    yield
    sys.modules.pop("own_models", None)


@pytest.fixture
def build(config_of):
    def build(data, name, precision="float64", **arguments):
        model = {"name": "custom", "_target_": f"own_models.{name}", "arguments": arguments}
        return build_model(config_of(model=model), data, precision)

    return build


def test_data_and_arguments_reach_the_module(build, text):
    module = build(text, "Bigram", width=7)
    assert module.model.tokens.weight.shape == (256, 7)
    assert module.model.tokens.weight.dtype == torch.float64


def test_the_vocabulary_of_the_next_token_is_known_to_the_module(build, text, monkeypatch):
    arguments = []
    monkeypatch.setattr("own_models.seen", arguments.append, raising=False)
    build(text, "Told")
    assert (arguments[0].vocabulary, arguments[0].classes) == (256, 256)


def test_default_loss_is_the_cross_entropy_of_real_labels(build, text):
    module = build(text, "Bigram")
    tokens, labels = torch.randint(256, (2, 3, 5))
    labels[0, 3:] = -100
    logits = module.model(tokens)
    by_hand = sum(
        torch.logsumexp(logits[i, j], 0) - logits[i, j, labels[i, j]]
        for i in range(3)
        for j in range(5)
        if labels[i, j] >= 0
    )
    loss, right = module(tokens, labels)
    torch.testing.assert_close(loss, by_hand)
    assert right == 0, "not counted in training"
    module.eval()
    assert module(tokens, labels)[1] == (logits.argmax(-1) == labels).sum()


def test_a_loss_and_a_count_of_its_own(build, vectors):
    module = build(vectors, "Brier", hidden=5).eval()
    inputs, labels = torch.rand(4, 6, dtype=torch.float64), torch.tensor([0, 2, 1, 0])
    chances = module.model(inputs)
    by_hand = sum((chances[i, c] - float(c == labels[i])) ** 2 for i in range(4) for c in range(3))
    loss, right = module(inputs, labels)
    torch.testing.assert_close(loss, by_hand)
    assert right == sum(chances[i, labels[i]] > 0.5 for i in range(4))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_module", r"must return a torch\.nn\.Module; it returned str"),
        ("nothing_to_train", "without parameters to train"),
        ("elsewhere", "must build its module on the CPU.*is on meta"),
        ("halved", "must have float32 parameters.*is bfloat16"),
        ("Missing", "has no 'Missing'.* Known here: .*Bigram"),
    ],
)
def test_what_is_no_model_is_refused(build, text, name, message):
    with pytest.raises(ConfigError, match=message):
        build(text, name)


def test_arguments_that_do_not_fit_are_refused(build, text):
    with pytest.raises(ConfigError, match=r"does not take these arguments.*wdith"):
        build(text, "Bigram", wdith=3)


def test_a_loss_that_is_no_scalar_is_refused(build, text):
    tokens = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"loss_sum must return a scalar.*shape \(6,\)"):
        build(text, "Vague")(tokens, tokens)


def test_outputs_that_do_not_fit_the_labels_are_refused(build, text):
    tokens = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"got \(2, 3, 256\) for labels of \(2,\)"):
        build(text, "Bigram")(tokens, torch.zeros(2, dtype=torch.long))
