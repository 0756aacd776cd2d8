"""The DDP engine against plain PyTorch."""

from __future__ import annotations

import copy

import numpy as np
import pandas as pd
import pytest
import torch

from batchscape.config import Ddp
from batchscape.engines.ddp import DdpEngine
from batchscape.models import build_model


def engine_of(config, world_size=1):
    module = build_model(config, 256, "float64")
    return DdpEngine(module, config.engine, config.optimizer, "float64", world_size)


def batch(count=8):
    tokens = torch.randint(256, (count, 33), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("clip", [None, 0.5, 1e3])
def test_steps_equal_a_plain_loop_over_the_whole_batch(config_of, clip):
    """Four weighted micro-steps a step, against one mean loss and PyTorch's own calls."""
    config = config_of(optimizer__gradient_clip_norm=clip)
    engine = engine_of(config)
    plain = build_model(config, 256, "float64")
    matrices = [p for p in plain.parameters() if p.ndim >= 2]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.9, 0.95),
        fused=False,
        foreach=False,
    )
    inputs, targets = batch()
    for k in range(4):
        learning_rate = 0.01 / (k + 1)
        losses = [
            engine.micro_step(
                inputs[2 * a : 2 * a + 2], targets[2 * a : 2 * a + 2], 1 / 256, last=a == 3
            )
            for a in range(4)
        ]
        norm = engine.optimizer_step(learning_rate)
        mean = plain(inputs, targets)[0] / targets.numel()
        mean.backward()
        largest = float("inf") if clip is None else clip
        plain_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), largest)
        for group in reference.param_groups:
            group["lr"] = learning_rate
        reference.step()
        reference.zero_grad()
        assert sum(losses) / 256 == pytest.approx(mean.item(), rel=1e-12)
        assert norm.item() == pytest.approx(plain_norm.item(), rel=1e-10)
    for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_gradients_of_another_layout_are_refused(config_of):
    engine = engine_of(config_of())
    inputs, targets = batch()
    engine.micro_step(inputs, targets, 1.0, last=True)
    weight = engine.module.model.tokens.weight
    weight.grad = weight.grad.T.contiguous().T
    with pytest.raises(RuntimeError, match=r"gradient of model\.tokens\.weight has strides"):
        engine.optimizer_step(0.1)


def test_gradients_ready_is_told_once_a_step(config_of):
    engine = engine_of(config_of())
    told = []
    engine.on_gradients = lambda: told.append(True)
    inputs, targets = batch()
    for last in (False, False, True):
        engine.micro_step(inputs, targets, 1.0, last=last)
    assert told == [True]


def test_state_round_trip(config_of):
    config = config_of()
    first, second = engine_of(config), engine_of(config)
    inputs, targets = batch()
    for _ in range(3):
        first.micro_step(inputs, targets, 1 / 256, last=True)
        first.optimizer_step(0.01)
    second.restore(copy.deepcopy(first.state()))  # as through a file
    for engine in (first, second):
        engine.micro_step(inputs, targets, 1 / 256, last=True)
        engine.optimizer_step(0.01)
    for mine, theirs in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert (mine == theirs).all()


def test_buckets_of_any_size_exchange_every_gradient_once(trainer, steps, tmp_path):
    """Many small buckets carry the same bytes and train alike."""
    tables = []
    for bucket_cap_mb in (25.0, 0.01):
        spec = trainer.make_spec((2, 8, 2), engine__bucket_cap_mb=bucket_cap_mb)
        tables.append(steps(trainer.train(spec, tmp_path / str(bucket_cap_mb))))
    one, many = tables
    assert one["exchanged_bytes"].tolist() == many["exchanged_bytes"].tolist()
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-12)


def test_bfloat16_follows_float32_smoothly(trainer, steps, tmp_path):
    """Pointwise bfloat16 noise, no drift: the mean of the last steps agrees."""
    losses = {}
    for precision in ("float32", "bfloat16"):
        spec = trainer.make_spec((2, 8, 2), engine__precision=precision, budget__optimizer_steps=60)
        losses[precision] = steps(trainer.train(spec, tmp_path / precision))["loss"].astype(float)
    difference = losses["bfloat16"] - losses["float32"]
    assert 0 < difference.abs().max() < 5e-2
    assert abs(difference.tail(20).mean()) < 1e-2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_run_agrees_and_its_compile_time_is_apart(trainer, steps, tmp_path):
    from batchscape.record.tables import read_table

    found = {}
    for compiled in (False, True):
        spec = trainer.make_spec(
            (1, 16, 2),
            engine__precision="float32",
            engine__compile=compiled,
            measure__memory=compiled,
            evaluation__batch_size=5,
        )
        # A cache of its own: what was compiled before costs nothing again.
        folder = trainer.train(
            spec, tmp_path / str(compiled), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor")
        )
        found[compiled] = steps(folder)["loss"].astype(float)
        compile_s = read_table(folder, "ranks")["compile_s"].iloc[0]
        # In no step, although the memory rehearsal has compiled the same model before.
        assert steps(folder)["step_time_s"].max() < 1.0
        assert compile_s > 1.0 if compiled else compile_s is pd.NA
    np.testing.assert_allclose(found[True], found[False], rtol=1e-4)


def test_config_default_is_one_bucket_of_25_mib():
    assert Ddp(name="ddp").bucket_cap_mb == 25.0
