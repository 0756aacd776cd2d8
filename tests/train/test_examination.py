"""Which kernels of attention torch chooses, seen where it chooses them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from batchscape.models.build import build_model
from batchscape.train import examination


class Attends(nn.Module):
    """Attention as the tests need it; its own matrix keeps it trained."""

    def __init__(self, *uses):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(8))
        self.uses = uses
        self.seen = []

    def forward(self, inputs, labels):
        hidden = (inputs @ self.matrix).unsqueeze(1)
        self.seen.append((len(inputs), torch.is_grad_enabled()))
        for settings in self.uses:
            hidden = scaled_dot_product_attention(hidden, hidden, hidden, **settings)
        return hidden.sum() + labels.sum(), labels.sum()


FUSED, WRITTEN_OUT = {"is_causal": True}, {"dropout_p": 0.5}
"""On a CPU torch has no kernel with dropout."""


@pytest.mark.parametrize(
    ("uses", "kernels"),
    [
        ([FUSED, FUSED], "flash"),
        ([WRITTEN_OUT], "math"),
        ([FUSED, WRITTEN_OUT], "flash, math"),
        ([], None),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_kernels_are_those_that_run(uses, kernels, precision):
    module = Attends(*uses)
    batch = torch.randn(3, 160, 8), torch.zeros(3)
    drawn = torch.get_rng_state()
    assert examination._attention_kernel(module, batch, precision) == kernels
    assert module.seen == [(3, True)], "torch chooses by whether there will be a backward"
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_model_that_does_not_fit_beside_its_activations_is_trained_all_the_same():
    class Large(nn.Module):
        def forward(self, *_):
            raise torch.OutOfMemoryError

    assert (
        examination._attention_kernel(Large(), (torch.zeros(1), torch.zeros(1)), "float32") is None
    )


def test_the_models_of_this_package_run_on_fused_kernels(spec_of):
    spec = spec_of(engine__precision="float32")
    module = build_model(spec.config, spec.data, spec.precision)
    tokens = torch.randint(256, (2, 33))
    kernels = examination._attention_kernel(module, (tokens[:, :-1], tokens[:, 1:]), spec.precision)
    assert kernels == "flash"


def test_no_more_samples_are_held_than_in_a_micro_batch(monkeypatch):
    class Samples:
        num_samples = 9

        def batch(self, indices):
            return torch.randn(len(indices), 16, 8), torch.zeros(len(indices))

    module = Attends(FUSED)
    monkeypatch.setattr(examination, "model_flops", lambda *_: None)
    facts = examination.examine(module, Samples(), torch.device("cpu"), "float32", 2)
    assert facts.attention_kernel == "flash"
    assert [count for count, keeps in module.seen if keeps] == [2]
