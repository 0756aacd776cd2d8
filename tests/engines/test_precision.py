"""Weights are cast once an optimizer step, and nothing else of it changes."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchscape.engines.ddp import DdpEngine
from batchscape.engines.precision import autocast
from batchscape.geometry import BatchGeometry
from batchscape.models.build import build_model
from batchscape.models.checkpointing import checkpoint_activations

MICRO_STEPS = 4


class CastsOf(TorchDispatchMode):
    """Counts how often each weight is cast down, by the memory that it lies in."""

    def __init__(self, lower):
        super().__init__()
        self.lower, self.counts = lower, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is self.lower:
            tensor = args[0]
            if isinstance(tensor, torch.nn.Parameter):
                self.counts[tensor.data_ptr()] = self.counts.get(tensor.data_ptr(), 0) + 1
        return func(*args, **kwargs)


def batches(count=MICRO_STEPS):
    tokens = torch.randint(256, (count, 17), generator=torch.Generator().manual_seed(3))
    return [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(count)]


def built(spec_of, precision, recomputes):
    spec = spec_of(engine={"name": "ddp", "precision": precision})
    module = build_model(spec.config, spec.data, precision)
    if recomputes:
        checkpoint_activations(module)
    return spec.config, module


@pytest.mark.parametrize(
    ("precision", "recomputes"),
    [
        ("bfloat16", False),
        pytest.param("bfloat16", True, marks=pytest.mark.slow),
        pytest.param("float16", False, marks=pytest.mark.slow),
    ],
)
def test_every_weight_is_cast_once_and_training_is_the_same_bit_for_bit(
    spec_of, precision, recomputes
):
    """Against autocast around every forward, which casts in each: two engines side by side."""
    lower = getattr(torch, precision)
    config, module = built(spec_of, precision, recomputes)
    _, other = built(spec_of, precision, recomputes)
    geometry = BatchGeometry(1, 1, 2, MICRO_STEPS)
    engine = DdpEngine(module, config.engine, config.optimizer, precision, geometry)
    plain = DdpEngine(other, config.engine, config.optimizer, precision, geometry)
    last = MICRO_STEPS - 1
    for _ in range(2):
        with CastsOf(lower) as once:
            losses = [
                engine.micro_step(*batch, 1 / 64, last=a == last)
                for a, batch in enumerate(batches())
            ]
        with CastsOf(lower) as always:
            plain_losses = []
            for batch in batches():
                with autocast("cpu", precision):
                    loss = plain.module(*batch)[0]
                plain._scaler.scale(loss / 64).backward()
                plain_losses.append(loss.detach())
        assert losses == plain_losses
        # The head, and 2 blocks of 4 layers with a bias each, which the last backward casts anew
        # where it computes them anew.
        again = 1 + recomputes
        assert sorted(once.counts.values()) == [1] + 16 * [again]
        assert sorted(always.counts.values()) == [MICRO_STEPS] + 16 * [again * MICRO_STEPS]
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        norms = [e.optimizer_step(config.optimizer, 1.0) for e in (engine, plain)]
        assert norms[0] == norms[1]
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_come_from_the_last_layer_to_the_first_in_every_micro_step(spec_of):
    """Or the exchange would wait for the end of the backward: copies of before are older."""
    config, module = built(spec_of, "bfloat16", recomputes=False)
    geometry = BatchGeometry(1, 1, 2, MICRO_STEPS)
    engine = DdpEngine(module, config.engine, config.optimizer, "bfloat16", geometry)
    arrived = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    for a, batch in enumerate(batches()):
        arrived.clear()
        engine.micro_step(*batch, 1 / 64, last=a == MICRO_STEPS - 1)
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in arrived))
        assert layers == [
            "model.norm",
            *(
                f"model.blocks.{block}.{layer}"
                for block in (1, 0)
                for layer in (
                    "contract",
                    "expand",
                    "mlp_norm",
                    "attention.projection",
                    "attention.qkv",
                    "attention_norm",
                )
            ),
            "model.positions",
            "model.tokens",
        ]


def test_a_module_of_a_user_may_change_the_default_type(spec_of):
    config, module = built(spec_of, "bfloat16", recomputes=False)
    losses = []
    for default in (torch.float32, torch.float64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            geometry = BatchGeometry(1, 1, 2, MICRO_STEPS)
            engine = DdpEngine(module, config.engine, config.optimizer, "bfloat16", geometry)
            steps = enumerate(batches())
            losses.append(
                [engine.micro_step(*b, 1 / 64, last=a == MICRO_STEPS - 1).item() for a, b in steps]
            )
        finally:
            torch.set_default_dtype(before)
    assert losses[0] == losses[1]


def test_what_is_forgotten_leaves_no_copy(spec_of):
    """Micro-steps that only compile end in no last one; weights may change after them."""
    config, module = built(spec_of, "bfloat16", recomputes=False)
    engine = DdpEngine(
        module, config.engine, config.optimizer, "bfloat16", BatchGeometry(1, 1, 2, 2)
    )
    batch = batches()[0]
    first = engine.micro_step(*batch, 1.0, last=False)
    engine.forget_gradients()
    with torch.no_grad():
        module.model.blocks[0].expand.weight.mul_(2.0)
    second = engine.micro_step(*batch, 1.0, last=True)
    with autocast("cpu", "bfloat16"):
        expected = module(*batch)[0]
    assert second == expected
    assert second != first
