"""The models against what they are meant to compute."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from batchscape.config import Gpt
from batchscape.errors import ConfigError
from batchscape.models.build import build_model
from batchscape.models.gpt import GptModel
from batchscape.record.spec import DataIdentity

GPT = {"name": "gpt", "n_layers": 2, "n_heads": 2, "d_model": 32}
LLAMA = {
    "name": "llama",
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_model": 32,
    "d_ff": 48,
}


def reference_forward(model, tokens, n_heads):
    """Compute the transformer with attention written out, from its state dictionary."""
    w = model.state_dict()
    samples, length = tokens.shape
    x = w["tokens.weight"][tokens] + w["positions.weight"][:length]
    width = x.shape[-1]

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    layer = 0
    while f"blocks.{layer}.attention.qkv.weight" in w:
        name = f"blocks.{layer}"
        h = norm(x, f"{name}.attention_norm")
        qkv = h @ w[f"{name}.attention.qkv.weight"].T + w[f"{name}.attention.qkv.bias"]
        q, k, v = (
            part.reshape(samples, length, n_heads, width // n_heads).transpose(1, 2)
            for part in qkv.split(width, dim=-1)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // n_heads)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mixed = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
        mixed = mixed.transpose(1, 2).reshape(samples, length, width)
        x = x + mixed @ w[f"{name}.attention.projection.weight"].T
        x = x + w[f"{name}.attention.projection.bias"]
        h = norm(x, f"{name}.mlp_norm") @ w[f"{name}.expand.weight"].T + w[f"{name}.expand.bias"]
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
        x = x + h @ w[f"{name}.contract.weight"].T + w[f"{name}.contract.bias"]
        layer += 1
    return norm(x, "norm") @ w["tokens.weight"].T


def test_transformer_equals_its_formula():
    torch.manual_seed(0)
    model = GptModel(Gpt(name="gpt", n_layers=2, n_heads=4, d_model=32), 50, 16).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(50, (3, 16))
    torch.testing.assert_close(
        model(tokens), reference_forward(model, tokens, 4), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize(
    ("n_layers", "n_heads", "d_model", "published"),
    [(12, 12, 768, 124_439_808), (24, 16, 1024, 354_823_168)],
)
def test_gpt2_sizes(n_layers, n_heads, d_model, published):
    """Parameter counts of GPT-2 small and medium (vocabulary 50257, context 1024)."""
    config = Gpt(name="gpt", n_layers=n_layers, n_heads=n_heads, d_model=d_model)
    with torch.device("meta"):
        assert sum(p.numel() for p in GptModel(config, 50257, 1024).parameters()) == published


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_short_context_attention_in_bfloat16_is_computed_in_float32(config_of, text, model):
    config = config_of(data__sequence_length=32, model=model)
    module = build_model(config, text, "bfloat16")
    tokens = torch.randint(256, (2, 33))
    exact, _ = module(tokens[:, :-1], tokens[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = module(tokens[:, :-1], tokens[:, 1:])
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=0)


def test_loss_is_a_sum_over_real_labels(config_of, text):
    module = build_model(config_of(), text, "float64")
    tokens = torch.randint(256, (4, 33))
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[1, 5:] = -100
    logits = module.model(inputs)
    rows = functional.log_softmax(logits, -1)[labels >= 0]
    by_hand = -rows[torch.arange(len(rows)), labels[labels >= 0]].sum()
    loss, _ = module(inputs, labels)
    torch.testing.assert_close(loss, by_hand)
    module.eval()
    _, right = module(inputs, labels)
    assert right == (logits.argmax(-1) == labels).sum()


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_parameters_depend_on_the_init_seed_alone(config_of, text, model):
    first = build_model(config_of(seed=1, data_seed=5, model=model), text, "float64").state_dict()
    torch.rand(7)
    again = build_model(config_of(init_seed=1, model=model), text, "float32").state_dict()
    other = build_model(config_of(seed=2, model=model), text, "float32").state_dict()
    assert all((first[name].float() == again[name]).all() for name in first)
    assert (other["model.tokens.weight"] != again["model.tokens.weight"]).any()


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_larger_vocabulary_is_taken_and_a_smaller_one_refused(config_of, text, model):
    module = build_model(config_of(model=model | {"vocabulary_size": 300}), text, "float32")
    assert module.model(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 300)
    with pytest.raises(ConfigError, match="at least the data's vocabulary, 256; given 255"):
        build_model(config_of(model=model | {"vocabulary_size": 255}), text, "float32")


def test_models_refuse_data_that_they_cannot_read(config_of, text, labelled, vectors):
    with pytest.raises(ConfigError, match="model=gpt predicts the next token"):
        build_model(config_of(), labelled, "float32")
    with pytest.raises(ConfigError, match="model=llama predicts the next token"):
        build_model(config_of(model=LLAMA), vectors, "float32")
    mlp = {"name": "mlp", "hidden_sizes": [4]}
    config = config_of(model=mlp, data={"name": "digits"})
    with pytest.raises(ConfigError, match="model=mlp needs samples that are vectors"):
        build_model(config, text, "float32")
    config = config_of(data={"name": "custom", "_target_": "mine.Data"})
    with pytest.raises(ConfigError, match=r"needs data\.sequence_length"):
        build_model(config, text, "float32")


def test_a_plan_asks_for_sources_without_torch():
    code = "import sys, batchscape.models.source, batchscape.models.vocabulary\n"
    code += "print({'torch', 'transformers', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("model", [GPT, LLAMA, {"name": "mlp", "hidden_sizes": [8]}], ids=str)
def test_data_that_do_not_say_their_classes_are_refused(config_of, model):
    data = {"name": "custom", "_target_": "a.b", "sequence_length": 8}
    untold = DataIdentity("hash", "", 100, 10, classes=0, task="other")
    with pytest.raises(ConfigError, match="an attribute `classes`"):
        build_model(config_of(model=model, data=data), untold, "float32")


class Draws(TorchDispatchMode):
    """Counts the numbers that are drawn."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_every_matrix_is_drawn_once_and_no_parameter_is_left_unset(config_of, text, model):
    """In memory that is full of what is no number."""
    torch.use_deterministic_algorithms(mode=True)  # fills what is allocated
    try:
        with Draws() as draws:
            module = build_model(config_of(model=model), text, "float32")
    finally:
        torch.use_deterministic_algorithms(mode=False)
    matrices = [p for p in module.parameters() if p.ndim == 2]
    assert draws.count == sum(p.numel() for p in matrices)
    assert len({id(p) for p in matrices}) == len(matrices) == (10 if model is GPT else 16)
    for name, parameter in module.named_parameters():
        assert parameter.isfinite().all(), name
        if parameter.ndim == 2:
            is_last = model is GPT and name.endswith(("projection.weight", "contract.weight"))
            expected = 0.02 / 2 if is_last else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name
            assert abs(parameter.mean().item()) < 5 * expected / parameter.numel() ** 0.5, name
        else:
            expected = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            assert (parameter == expected).all(), name
