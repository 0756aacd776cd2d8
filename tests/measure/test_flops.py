"""Counted operations against the formula of Chowdhery et al. 2022, appendix B."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from batchscape.measure.flops import _OperationCounter, model_flops, model_operations
from batchscape.models.build import build_model
from batchscape.models.checkpointing import checkpoint_activations
from batchscape.record.spec import DataIdentity

TEXT = DataIdentity("hash", "folder", 100, 10, classes=256, task="next_token")
SAMPLES, LENGTH = 3, 32
GPT = {"name": "gpt", "n_layers": 3, "n_heads": 2, "d_model": 32}
LLAMA = {"name": "llama", "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 32, "d_ff": 48}
TRANSFORMERS = {
    "name": "transformers",
    "settings": {"model_type": "gpt2", "n_layer": 3, "n_head": 2, "n_embd": 32},
}


def batch(length=LENGTH):
    tokens = torch.zeros(SAMPLES, length, dtype=torch.long)
    return tokens, tokens


def palm(matrices, layers, width, length=LENGTH):
    """6N + 12LHQT a token; N counts the parameters of matrix products."""
    return SAMPLES * length * (6 * matrices + 12 * layers * width * length)


@pytest.mark.parametrize(
    ("model", "matrices"),
    [
        (GPT, 3 * 12 * 32**2 + 256 * 32),
        (LLAMA, 2 * (2 * 32**2 + 2 * 32 * 16 + 3 * 32 * 48) + 256 * 32),
    ],
    ids=["gpt", "llama"],
)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_transformers_follow_the_formula(config_of, model, matrices, precision):
    module = build_model(config_of(model=model), TEXT, precision)
    assert model_flops(module, *batch()) == palm(matrices, model["n_layers"], 32)


def test_a_shorter_sequence_has_less_attention(config_of):
    module = build_model(config_of(model=GPT), TEXT, "float32")
    assert model_flops(module, *batch(8)) == palm(3 * 12 * 32**2 + 256 * 32, 3, 32, 8)


def test_gpt2_124m_costs_nothing_to_count(config_of):
    """The published shape: N = 124,439,808 less positions; biases and norms multiply nothing."""
    gpt2 = {"name": "gpt", "n_layers": 12, "n_heads": 12, "d_model": 768, "vocabulary_size": 50257}
    with torch.device("meta"):
        module = build_model(config_of(model=gpt2, data__sequence_length=1024), TEXT, "float32")
    matrices = 124_439_808 - 1024 * 768 - 12 * (13 * 768) - 2 * 768
    tokens = torch.zeros(1, 1024, dtype=torch.long, device="meta")
    assert model_flops(module, tokens, tokens) == 1024 * (6 * matrices + 12 * 12 * 768 * 1024)


def test_an_mlp_does_six_operations_a_parameter(config_of):
    digits = DataIdentity("hash", "folder", 100, 10, classes=10, task="class", features=64)
    config = config_of(model={"name": "mlp", "hidden_sizes": [20, 30]}, data={"name": "digits"})
    module = build_model(config, digits, "float32")
    first, rest = 64 * 20, 20 * 30 + 30 * 10
    # Nobody asks for the gradient of the inputs.
    expected = 5 * (4 * first + 6 * rest)
    assert model_flops(module, torch.zeros(5, 64), torch.zeros(5, dtype=torch.long)) == expected


@pytest.mark.slow
def test_transformers_own_gpt2_follows_the_formula(config_of):
    pytest.importorskip("transformers")
    module = build_model(config_of(model=TRANSFORMERS), TEXT, "float32")
    assert model_flops(module, *batch()) == palm(3 * 12 * 32**2 + 256 * 32, 3, 32)


@pytest.mark.parametrize(
    "model",
    [
        GPT,
        {**GPT, "loss_chunk": 48, "dropout": 0.1},
        LLAMA,
        pytest.param(TRANSFORMERS, marks=pytest.mark.slow),
    ],
    ids=["gpt", "chunked", "llama", "transformers"],
)
def test_layers_that_are_alike_are_counted_as_if_each_were_worked_out(
    config_of, model, monkeypatch
):
    module = build_model(config_of(model=model), TEXT, "float32")
    counters = []
    initialise = _OperationCounter.__init__
    monkeypatch.setattr(
        _OperationCounter, "__init__", lambda self: (initialise(self), counters.append(self))[0]
    )
    operations = model_operations(module, *batch())
    first, *others = counters
    asked = []

    def every_time(_, func, args, kwargs):
        asked.append(func)
        return func(*args, **kwargs)

    monkeypatch.setattr(_OperationCounter, "_result", every_time)
    assert operations == model_operations(module, *batch())
    # Models that look at devices are counted a second time, on tensors that are not reused.
    assert len(counters) == 2 * (1 + len(others)), "reuse makes no counting fail"
    assert others or 0 < len(first._layouts_by_key) < len(asked) / 2
    assert bool(others) == (model is TRANSFORMERS)


def test_recomputation_is_not_the_models_work(config_of):
    module = build_model(config_of(model=GPT), TEXT, "float32")
    checkpoint_activations(module)
    assert model_flops(module, *batch()) is None, "missing, not wrong"


def test_compiled_modules_are_counted_as_written(config_of):
    module = build_model(config_of(model=GPT), TEXT, "float32")
    plain = model_flops(module, *batch())
    module.compile(backend=refuse_to_compile)
    assert model_flops(module, *batch()) == plain


def refuse_to_compile(*_):
    pytest.fail("compiled")


def test_counting_changes_nothing(config_of):
    module = build_model(config_of(model=GPT | {"dropout": 0.3}), TEXT, "float32")
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    rng = torch.get_rng_state()
    model_flops(module, *batch())
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(state[name], t) for name, t in module.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None for p in module.parameters())


class Summed(nn.Module):
    """Gives a module a loss."""

    def __init__(self, layer, call=None):
        super().__init__()
        self.layer = layer
        self.call = call or (lambda layer, inputs: layer(inputs))

    def forward(self, inputs, _labels):
        return self.call(self.layer, inputs).sum(), None


def test_convolutions_are_counted():
    layer = nn.Conv2d(3, 5, 3, padding=1)
    images = torch.zeros(2, 3, 8, 8)
    forward = 2 * (5 * 8 * 8) * (3 * 3 * 3) * 2
    assert model_flops(Summed(layer), images, images) == 2 * forward


def test_products_without_a_formula_are_missing():
    layer = nn.Linear(4, 4)
    layer.extra = nn.Parameter(torch.zeros(4))
    vectors = torch.zeros(3, 4)
    both = Summed(layer, lambda layer, x: layer(x) @ layer.extra)
    assert model_flops(both, vectors, vectors) is None


def test_parameters_that_a_copy_does_not_have_are_missing_and_left_alone():
    layer = nn.Linear(4, 4)
    vectors = torch.zeros(3, 4)
    module = Summed(layer, lambda _, x: layer(x))
    assert model_flops(module, vectors, vectors) is None
    assert layer.weight.grad is None
    module(vectors, vectors)[0].backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x: layer(x) * float(x.sum()),
        lambda layer, x: checkpoint(layer, x, use_reentrant=False),
        lambda layer, x: x.sum() * layer.weight.sum(),
    ],
    ids=["depends on values", "recomputes by itself", "multiplies no matrices"],
)
def test_what_cannot_be_counted_is_missing(call):
    layer = nn.Linear(4, 4)
    vectors = torch.ones(3, 4)
    assert model_flops(Summed(layer, call), vectors, vectors) is None


def test_constants_that_are_no_buffers_do_not_stop_the_count():
    layer = nn.Linear(4, 4)
    constant = torch.ones(4)
    vectors = torch.ones(3, 4)
    module = Summed(layer, lambda layer, x: functional.relu(layer(x) * constant))
    assert model_flops(module, vectors, vectors) == 3 * 4 * 4 * 4


def test_what_a_model_keeps_of_a_forward_does_not_reach_the_training():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.mask = None

        def forward(self, inputs):
            if self.mask is None:
                self.mask = inputs.new_ones(4)
            return self.layer(inputs) * self.mask

    module = Summed(Keeping())
    vectors = torch.ones(3, 4)
    assert model_flops(module, vectors, vectors) == 3 * 4 * 4 * 4
    module(vectors, vectors)[0].backward()


@pytest.mark.gpu
def test_a_device_has_the_same_operations(config_of):
    module = build_model(config_of(model=GPT), TEXT, "float32")
    on_cpu = model_flops(module, *batch())
    assert model_flops(module.cuda(), *(part.cuda() for part in batch())) == on_cpu
