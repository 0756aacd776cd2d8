"""Optimizers against written-out updates, and which parameters Muon takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchscape.config import AdamW, Muon, Sgd
from batchscape.engines.optimizers import (
    build_optimizer,
    clip_gradients,
    hidden_matrices,
    set_hyperparameters,
)
from batchscape.errors import ConfigError
from batchscape.models.build import build_model

SGD = Sgd(name="sgd", learning_rate=0.1, momentum=0.8, nesterov=True, weight_decay=0.3)
ADAMW = AdamW(name="adamw", learning_rate=0.01, weight_decay=0.3)
MUON = Muon(name="muon", learning_rate=0.02, adamw_learning_rate=0.01, weight_decay=0.3)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    return layers.double()


def give_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = drawn


def trained(config, steps=5, factors=(1.0, 0.5)):
    module = network()
    optimizer = build_optimizer(config, module)
    for k in range(steps):
        give_gradients(module, k)
        set_hyperparameters(optimizer, config, factors[k % len(factors)])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return module


def plain(make, steps=5, factors=(1.0, 0.5)):
    """Train by PyTorch's plain loop: no fused kernel, decay of matrices alone."""
    module = network()
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.ndim < 2]
    optimizer = make([
        {"params": matrices, "weight_decay": 0.3},
        {"params": vectors, "weight_decay": 0.0},
    ])  # fmt: skip
    peak = optimizer.param_groups[0]["lr"]
    for k in range(steps):
        give_gradients(module, k)
        for group in optimizer.param_groups:
            group["lr"] = peak * factors[k % len(factors)]
        optimizer.step()
    return module


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (
            SGD,
            lambda groups: torch.optim.SGD(
                groups, lr=0.1, momentum=0.8, nesterov=True, fused=False, foreach=False
            ),
        ),
        (
            ADAMW,
            lambda groups: torch.optim.AdamW(
                groups, lr=0.01, betas=(0.9, 0.95), fused=False, foreach=False
            ),
        ),
    ],
    ids=["sgd", "adamw"],
)
def test_fused_updates_equal_the_plain_loop(config, make):
    for mine, theirs in zip(trained(config).parameters(), plain(make).parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def muon_in_float64(weight, gradients, rates, config):
    """Muon as its author writes it (K. Jordan 2024), every number in float64."""
    weight, momentum = weight.copy(), np.zeros_like(weight)
    for gradient, rate in zip(gradients, rates, strict=True):
        momentum = config.momentum * momentum + (1 - config.momentum) * gradient
        update = config.momentum * momentum + (1 - config.momentum) * gradient
        x = update / np.linalg.norm(update)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        for _ in range(config.newton_schulz_steps):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        x = x.T if tall else x
        wide = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
        weight = weight * (1 - rate * config.weight_decay) - rate * wide * x
    return weight


@pytest.mark.parametrize("shape", [(12, 6), (6, 12)], ids=str)
def test_muon_equals_newton_schulz_written_out(shape):
    config = Muon(name="muon", learning_rate=0.02, weight_decay=0.3)
    layers = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False), nn.Linear(shape[0], 2))
    module = layers.double()
    weight = module[0].weight
    before = weight.detach().numpy().copy()
    optimizer = build_optimizer(config, module)
    gradients, rates = [], [0.02, 0.01, 0.02]
    for k, rate in enumerate(rates):
        give_gradients(module, k)
        assert weight.grad is not None
        gradients.append(weight.grad.numpy().copy())
        set_hyperparameters(optimizer, config, rate / 0.02)
        optimizer.step()
    moved = weight.detach().numpy() - before
    expected = muon_in_float64(before, gradients, rates, config)
    error = np.linalg.norm(moved - (expected - before)) / np.linalg.norm(expected - before)
    # PyTorch iterates in bfloat16: 2^-8 a product, over five iterations.
    assert error < 0.02


def test_the_rest_beside_muon_is_adamw():
    """Embedding, last layer and vectors move as under AdamW alone."""
    adamw = AdamW(name="adamw", learning_rate=0.01, weight_decay=0.3)
    mine, theirs = trained(MUON), trained(adamw)
    same_settings = [
        name
        for (name, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True)
        if (one == other).all()
    ]
    assert same_settings == ["0.weight", "1.bias", "3.weight", "3.bias"]


def names_of(module, chosen):
    taken = {id(p) for p in chosen}
    return [name for name, p in module.named_parameters() if id(p) in taken]


def test_hidden_matrices_of_a_transformer_with_tied_embeddings(spec_of):
    spec = spec_of()
    module = build_model(spec.config, spec.data, "float32")
    names = names_of(module, hidden_matrices(module))
    parts = ("attention.qkv", "attention.projection", "expand", "contract")
    assert names == [f"model.blocks.{i}.{part}.weight" for i in range(2) for part in parts]


def test_hidden_matrices_of_a_perceptron_and_a_network_of_ones_own():
    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 3)
            self.pixels = nn.Conv2d(1, 8, 2)
            self.mix = nn.MultiheadAttention(8, 2)
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.last = nn.Linear(8, 3)

    module = Mine()
    # A head is the last layer where it comes last; convolutions are no matrices.
    assert names_of(module, hidden_matrices(module)) == [
        "head.weight",
        "mix.in_proj_weight",
        "mix.out_proj.weight",
    ]
    assert names_of(network(), hidden_matrices(network())) == []
    layers = network()
    assert names_of(layers, hidden_matrices(layers)) == ["1.weight"]


def test_hidden_matrices_of_transformers_models():
    transformers = pytest.importorskip("transformers")
    tiny = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 4}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**tiny))
    attention, mlp = "transformer.h.0.attn", "transformer.h.0.mlp"
    assert names_of(gpt2, hidden_matrices(gpt2)) == [
        f"{attention}.c_attn.weight",
        f"{attention}.c_proj.weight",
        f"{mlp}.c_fc.weight",
        f"{mlp}.c_proj.weight",
    ]
    small = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    llama = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**small, num_hidden_layers=1, vocab_size=11)
    )
    names = names_of(llama, hidden_matrices(llama))
    assert len(names) == 7
    assert all(name.startswith("model.layers.0.") for name in names)


def test_muon_without_a_matrix_to_take_is_refused():
    with pytest.raises(ConfigError, match=r"has none .*; use optimizer=adamw"):
        build_optimizer(MUON, nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)))


def test_muon_that_torch_does_not_ship_is_refused(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"needs torch\.optim\.Muon"):
        build_optimizer(MUON, network())


@pytest.mark.parametrize("config", [SGD, ADAMW, MUON], ids=lambda config: config.name)
def test_settings_of_a_step_reach_every_group(config):
    optimizer = build_optimizer(config, network())
    scaled = type(config)(**{**vars(config), "learning_rate": 0.4, "weight_decay": 0.7})
    set_hyperparameters(optimizer, scaled, 0.25)
    for group in optimizer.param_groups:
        matrices = {p.ndim >= 2 for p in group["params"]}
        assert group["weight_decay"] == (0.7 if matrices == {True} else 0.0)
        rate = 0.01 if config is MUON and not group["is_muon"] else 0.4
        assert group["lr"] == rate * 0.25


def test_clipping_sees_the_whole_gradient():
    module = network()
    give_gradients(module, 0)
    everything = torch.cat([p.grad.ravel() for p in module.parameters() if p.grad is not None])
    assert clip_gradients(module, 0.5).item() == pytest.approx(everything.norm().item())
    clipped = torch.cat([p.grad.ravel() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(clipped, everything * 0.5 / everything.norm(), rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("config", "tolerance"),
    [(SGD, 1e-12), (ADAMW, 1e-12), (MUON, 0.02)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_device_updates_as_the_cpu_does(config, tolerance):
    before = torch.cat([p.detach().ravel() for p in network().parameters()])
    moved = []
    for device in ("cpu", "cuda"):
        module = network().to(device)
        optimizer = build_optimizer(config, module)
        for k in range(3):
            on_cpu = network()
            give_gradients(on_cpu, k)
            for parameter, drawn in zip(module.parameters(), on_cpu.parameters(), strict=True):
                assert drawn.grad is not None
                parameter.grad = drawn.grad.to(device)
            set_hyperparameters(optimizer, config, 0.5)
            optimizer.step()
        after = torch.cat([p.detach().cpu().ravel() for p in module.parameters()])
        moved.append(after - before)
    assert (moved[1] - moved[0]).norm() <= tolerance * moved[0].norm()


@pytest.mark.parametrize("config", [SGD, ADAMW, MUON], ids=lambda config: config.name)
def test_a_scaled_loss_leaves_a_matrix_without_a_gradient_alone(config):
    module, scaled = network(), network()
    for each, scaler in ((module, GradScaler("cpu", enabled=False)), (scaled, GradScaler("cpu"))):
        optimizer = build_optimizer(config, each)
        for k in range(2):
            give_gradients(each, k)
            each[1].weight.grad = None
            scale = scaler.scale(torch.ones(()))
            for parameter in each.parameters():
                if parameter.grad is not None:
                    parameter.grad *= scale
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert torch.equal(scaled[1].weight, network()[1].weight)
    assert all(map(torch.equal, module.parameters(), scaled.parameters()))


class Waiting(TorchDispatchMode):
    """Refuses to read a number off a tensor, for which the host would wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", [SGD, ADAMW, MUON], ids=lambda config: config.name)
def test_an_overflow_leaves_nothing_behind_and_nobody_waits_to_know_of_it(config, monkeypatch):
    """A training whose scaled loss overflowed at times is the one that never met these steps."""
    empty = torch.empty_like
    # Memory that nothing was written to may hold anything.
    monkeypatch.setattr(torch, "empty_like", lambda like: empty(like).fill_(torch.nan))
    trained = []
    for overflows in (set(), {0, 3}):
        module = network()
        optimizer = build_optimizer(config, module)
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        seeds = iter(range(3))
        for k in range(3 + len(overflows)):
            give_gradients(module, 99 if k in overflows else next(seeds))
            with torch.no_grad(), Waiting():
                for parameter in module.parameters():
                    scaler.scale(parameter.grad.sum())  # as the loss was: it makes the scale
                    parameter.grad *= scaler._scale
                if k in overflows:
                    module[1].weight.grad[0, 0] = torch.inf
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad(set_to_none=True)
        assert scaler.get_scale() == 2.0 ** (10 - len(overflows))
        kept = [*module.parameters(), *tree_leaves(optimizer.state_dict())]
        trained.append([each for each in kept if isinstance(each, torch.Tensor)])
    never, at_times = trained
    assert len(never) == len(at_times)
    assert all(map(torch.equal, never, at_times))
    unscaled = network()
    optimizer = build_optimizer(config, unscaled)
    for k in range(3):
        give_gradients(unscaled, k)
        optimizer.step()
    assert all(map(torch.equal, unscaled.parameters(), never))
