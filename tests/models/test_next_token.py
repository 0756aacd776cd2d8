"""Losses in parts against the plain model, and against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from batchscape.config import AdamW
from batchscape.config.data import IGNORED
from batchscape.engines.optimizers import build_optimizer
from batchscape.engines.precision import autocast
from batchscape.measure.flops import model_flops
from batchscape.models import next_token
from batchscape.models.build import build_model
from batchscape.record.spec import DataIdentity
from batchscape.train.examination import examine

GPT = {"name": "gpt", "n_layers": 1, "n_heads": 2, "d_model": 16}
LLAMA = {
    "name": "llama",
    "n_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 1,
    "d_model": 16,
    "d_ff": 24,
}
MODELS = [GPT, LLAMA]
TOKENS = 101
TEXT = DataIdentity("hash", "folder", 100, 10, classes=TOKENS, task="next_token")


def built(config_of, model, precision="float64", **settings):
    return build_model(config_of(model=model | settings), TEXT, precision)


def batch(samples=3, length=8):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(TOKENS, (samples, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :3] = IGNORED
    return tokens[:, :-1], labels


def trained(module, steps=5):
    """Return losses of a few steps; the first gradients of parameters by name; and the module."""
    optimizer = build_optimizer(AdamW(name="adamw", learning_rate=0.01), module)
    losses, first = [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(*batch())[0]
        (loss / 21).backward()
        first = first or {n: p.grad.clone() for n, p in module.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, first


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk", [5, 1000])
def test_both_train_as_the_plain_model_does(config_of, model, chunk):
    plain, other = built(config_of, model), built(config_of, model, loss_chunk=chunk)
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
    losses, gradients = trained(plain)
    other_losses, other_gradients = trained(other)
    assert other_losses == pytest.approx(losses, rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-9, atol=1e-14)
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-7, atol=1e-12, msg=name)


def test_a_loss_in_parts_has_the_gradient_of_its_finite_differences():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(rows, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for rows in (7, 5)
    )
    labels = torch.tensor([0, 2, IGNORED, 1, 2, IGNORED, 0])
    assert torch.autograd.gradcheck(
        lambda *both: next_token._cross_entropy_sum(*both, labels, 3), (hidden, weight)
    )


@pytest.mark.parametrize(
    ("precision", "loss_error", "error"), [("float32", 1e-6, 1e-5), ("bfloat16", 1e-6, 1e-2)]
)
def test_a_loss_in_parts_is_as_precise_as_a_whole_one(config_of, precision, loss_error, error):
    """Within rounding; the loss is that of the same logits, the gradient of bfloat16 products."""
    plain = built(config_of, GPT, precision)
    other = built(config_of, GPT, precision, loss_chunk=5)
    losses = []
    for module in (plain, other):
        with autocast("cpu", precision):
            loss = module(*batch())[0]
        (3 * loss).backward()
        losses.append(loss.item())
        assert loss.dtype == torch.float32
    assert losses[1] == pytest.approx(losses[0], rel=loss_error)
    for (name, one), two in zip(plain.named_parameters(), other.parameters(), strict=True):
        far = (one.grad - two.grad).norm() / one.grad.norm()
        assert far < error, name


def test_what_is_kept_for_the_backward_does_not_grow_with_the_vocabulary_times_the_labels():
    """Counted in numbers kept: gradients of hidden states and matrix, not logits."""
    labels, rows, width = 512, 4096, 16
    kept = {}
    hidden = torch.randn(labels, width, requires_grad=True)
    weight = torch.randn(rows, width, requires_grad=True)
    targets = torch.randint(rows, (labels,))

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = next_token._cross_entropy_sum(hidden, weight, targets, 64)
        assert sum(kept.values()) == (labels + rows) * width
        kept.clear()
        loss_of_all = functional.cross_entropy(
            functional.linear(hidden, weight), targets, reduction="sum"
        )
        assert sum(kept.values()) > labels * rows
    torch.testing.assert_close(loss, loss_of_all)


def test_without_gradients_none_are_made(config_of):
    module = built(config_of, GPT, loss_chunk=5)
    with torch.no_grad():
        loss, right = module(*batch())
    assert loss.item() == pytest.approx(built(config_of, GPT)(*batch())[0].item(), rel=1e-12)
    assert right == 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.slow
def test_operations_are_those_of_the_plain_model(config_of, model):
    dataset = Fixed()
    device = torch.device("cpu")
    plain = examine(built(config_of, model), dataset, device, "float64", 2)
    assert plain.model_flops_per_sample == model_flops(built(config_of, model), *batch(1))
    chunked = build_model(config_of(model=model | {"loss_chunk": 5}), TEXT, "float64")
    assert examine(chunked, dataset, device, "float64", 2) == plain


class Fixed:
    """Samples without padding."""

    num_samples = 4

    def batch(self, indices):
        inputs, _ = batch(len(indices))
        return inputs, inputs.roll(1, 1)
