"""The DDP engine against plain PyTorch."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from batchscape.config import AdamW
from batchscape.engines import ddp
from batchscape.engines.ddp import DdpEngine
from batchscape.engines.optimizers import build_optimizer
from batchscape.errors import BatchscapeError
from batchscape.geometry import BatchGeometry
from batchscape.models.build import build_model


def engine_of(spec, world_size=1):
    module = build_model(spec.config, spec.data, spec.precision)
    config = spec.config
    geometry = BatchGeometry(1, world_size, 8, 1)
    return DdpEngine(module, config.engine, config.optimizer, spec.precision, geometry)


SETTINGS = AdamW(name="adamw", learning_rate=0.01)


def batch(count=8):
    tokens = torch.randint(256, (count, 33), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_steps_equal_a_plain_loop_over_the_whole_batch(spec_of, clip):
    """Four weighted micro-steps a step, against one mean loss and PyTorch's own calls."""
    spec = spec_of(optimizer__gradient_clip_norm=clip)
    engine = engine_of(spec)
    plain = build_model(spec.config, spec.data, "float64")
    matrices = [p for p in plain.parameters() if p.ndim >= 2]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.9, 0.95),
        fused=False,
        foreach=False,
    )
    inputs, labels = batch()
    for k in range(4):
        factor = 1 / (k + 1)
        losses = [
            engine.micro_step(
                inputs[2 * a : 2 * a + 2], labels[2 * a : 2 * a + 2], 1 / 256, last=a == 3
            )
            for a in range(4)
        ]
        norm = engine.optimizer_step(spec.config.optimizer, factor)
        mean = plain(inputs, labels)[0] / labels.numel()
        mean.backward()
        largest = float("inf") if clip is None else clip
        plain_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), largest)
        for group in reference.param_groups:
            group["lr"] = spec.config.optimizer.learning_rate * factor
        reference.step()
        reference.zero_grad()
        assert sum(losses) / 256 == pytest.approx(mean.item(), rel=1e-12)
        assert norm.item() == pytest.approx(plain_norm.item(), rel=1e-10)
    for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_gradients_of_another_layout_are_refused(spec_of):
    engine = engine_of(spec_of())
    inputs, labels = batch()
    engine.micro_step(inputs, labels, 1.0, last=True)
    weight = engine.module.model.tokens.weight
    weight.grad = weight.grad.T.contiguous().T
    with pytest.raises(RuntimeError, match=r"gradient of model\.tokens\.weight has strides"):
        engine.optimizer_step(SETTINGS, 1.0)


class RecordedMarks:
    """Marks that remember their order."""

    def __init__(self):
        self.order = []

    def exchange_begins(self):
        self.order.append("exchange begins")

    def gradients_ready(self):
        self.order.append("gradients ready")

    def exchange_ends(self):
        self.order.append("exchange ends")


def test_a_rank_that_trains_alone_tells_of_its_gradients_only(spec_of):
    engine = engine_of(spec_of())
    engine.marks = marks = RecordedMarks()
    inputs, labels = batch()
    for last in (False, False, True):
        engine.micro_step(inputs, labels, 1.0, last=last)
    assert marks.order == ["gradients ready"]


def test_an_exchange_is_told_of_once_a_step_and_in_order(spec_of, tmp_path, monkeypatch):
    """In a group of one, of many small buckets."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    small = partial(DistributedDataParallel, bucket_cap_mb=0.01)
    monkeypatch.setattr(ddp, "DistributedDataParallel", small)
    try:
        engine = engine_of(spec_of(), world_size=2)
        engine.marks = marks = RecordedMarks()
        inputs, labels = batch()
        for _ in range(2):  # DDP builds its buckets anew after the first step
            for last in (False, False, True):
                engine.micro_step(inputs, labels, 1.0, last=last)
            engine.optimizer_step(SETTINGS, 1.0)
        engine.close()
    finally:
        dist.destroy_process_group()
    assert marks.order == ["exchange begins", "gradients ready", "exchange ends"] * 2


def test_state_round_trip(spec_of):
    spec = spec_of(engine__precision="float16")
    first, second = engine_of(spec), engine_of(spec)
    inputs, labels = batch()
    for weight in (1 / 256, 1e30, 1 / 256):  # the second overflows
        first.micro_step(inputs, labels, weight, last=True)
        first.optimizer_step(SETTINGS, 1.0)
    second.restore(copy.deepcopy(first.state()))  # as through a file
    for engine in (first, second):
        engine.micro_step(inputs, labels, 1 / 256, last=True)
        assert engine.gradient_scale == 2**15
        engine.optimizer_step(SETTINGS, 1.0)
    for mine, theirs in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert (mine == theirs).all()


@pytest.mark.slow
def test_buckets_exchange_every_gradient_once(trainer, steps, tmp_path):
    """Several buckets (PyTorch's first one has 1 MiB) train as one rank that has no exchange.

    By SGD, and by the norm: AdamW hardly sees the length of a gradient.
    """
    tables = []
    for geometry in ((1, 32, 1), (2, 8, 2)):
        more = {"optimizer": {"name": "sgd", "learning_rate": 0.1}, "model__d_model": 128}
        spec = trainer.make_spec(geometry, budget__optimizer_steps=8, **more)
        tables.append(steps(trainer.train(spec, tmp_path / str(geometry[0]))))
    alone, several = tables
    assert min(several["exchanged_bytes"]) > 2 * 2**20
    assert set(alone["exchanged_bytes"]) == {0}
    assert alone["loss"].iloc[-1] < alone["loss"].iloc[0] - 0.05, "nothing was learned"
    for column in ("loss", "gradient_norm"):
        np.testing.assert_allclose(
            several[column].astype(float), alone[column].astype(float), rtol=1e-9
        )


def test_float16_equals_a_loss_scaled_by_hand(spec_of):
    """Scales are powers of two: scaling and unscaling by hand gives the very same update."""
    spec = spec_of(engine__precision="float16", optimizer__gradient_clip_norm=0.5)
    engine = engine_of(spec)
    plain = build_model(spec.config, spec.data, "float16")
    reference = build_optimizer(spec.config.optimizer, plain)
    inputs, labels = batch()
    for _ in range(3):
        engine.micro_step(inputs, labels, 1 / 256, last=True)
        norm = engine.optimizer_step(spec.config.optimizer, 1.0)
        with torch.autocast("cpu", torch.float16):
            loss = plain(inputs, labels)[0]
        (loss / 256 * 2**16).backward()
        for parameter in plain.parameters():
            parameter.grad /= 2**16
        plain_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        assert norm == plain_norm
        assert not engine.skipped
    for mine, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert (mine == theirs).all()


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_an_overflow_in_float16_skips_the_update_and_halves_the_scale(spec_of, name):
    spec = spec_of(engine__precision="float16", optimizer={"name": name, "learning_rate": 0.01})
    engine, settings = engine_of(spec), spec.config.optimizer
    inputs, labels = batch()
    before = copy.deepcopy(engine.module.state_dict())
    engine.micro_step(inputs, labels, 1e30, last=True)
    assert engine.gradient_scale == 2**16
    norm = engine.optimizer_step(settings, 1.0)
    assert engine.skipped
    assert not norm.isfinite()
    assert engine.gradient_scale == 2**15
    after = engine.module.state_dict()
    assert all((after[name] == before[name]).all() for name in before)
    engine.micro_step(inputs, labels, 1 / 256, last=True)
    assert engine.optimizer_step(settings, 1.0).isfinite()
    assert not engine.skipped
    assert any((after[name] != before[name]).any() for name in before)


def test_other_precisions_scale_nothing(spec_of):
    engine = engine_of(spec_of(engine__precision="bfloat16"))
    inputs, labels = batch()
    engine.micro_step(inputs, labels, 1 / 256, last=True)
    assert engine.gradient_scale == 1.0
    engine.optimizer_step(SETTINGS, 1.0)
    assert engine.skipped is None


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_the_update_of_all(trainer, steps, outcome, tmp_path):
    """Two ranks of which one overflows train like one rank that does."""
    tables = []
    for geometry in [(2, 16, 1), (1, 32, 1)]:
        spec = trainer.make_spec(geometry, engine__precision="float16", budget__optimizer_steps=8)
        folder = trainer.train(spec, tmp_path, entry="precision_workers:overflowing")
        assert outcome(folder)["status"] == "completed"
        tables.append(steps(folder))
    for table in tables:
        assert table["optimizer_step"][table["skipped"]].tolist() == [4]
        assert not np.isfinite(table["gradient_norm"].astype(float)[3])
    two, one = (table["loss"].astype(float) for table in tables)
    np.testing.assert_allclose(two, one, rtol=0, atol=5e-2 / 8)


@pytest.mark.slow
def test_products_of_float32_matrices_are_as_asked(trainer, tmp_path):
    spec = trainer.make_spec(engine__float32_matmul="high", budget__optimizer_steps=1)
    folder = trainer.train(spec, tmp_path, entry="precision_workers:telling")
    assert "float32 products: high\n" in folder.log.read_text()


OWN = {"name": "custom", "arguments": {}}


@pytest.mark.slow
def test_parameters_without_a_gradient_have_one_of_zero(trainer, steps, tmp_path):
    """A layer that few samples use: all numbers of ranks train alike."""
    tables = []
    for geometry in [(1, 8, 1), (2, 2, 2)]:
        model = OWN | {"_target_": "own_models.Routed"}
        spec = trainer.make_spec(geometry, model=model, budget__optimizer_steps=6)
        tables.append(steps(trainer.train(spec, tmp_path)))
    module = build_model(spec.config, spec.data, "float64")
    declared = 8 * sum(p.numel() for p in module.parameters())
    for table, exchanged in zip(tables, (0, declared), strict=True):
        assert table["exchanged_bytes"].tolist() == [exchanged] * 6
        for column in ("loss", "gradient_norm"):
            np.testing.assert_allclose(
                table[column].to_numpy(float), tables[0][column].to_numpy(float), rtol=1e-9
            )


@pytest.fixture
def group_of_one(tmp_path):
    """A process group, for an engine that believes in others."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("trainer", "group_of_one")
def test_an_exchange_that_is_not_whole_is_refused_by_name(spec_of):
    """All of it would be left out, as buckets are exchanged in order."""
    engine = engine_of(spec_of(model=OWN | {"_target_": "own_models.Routed"}), world_size=2)
    inputs, labels = batch()
    inputs[0, 0] = engine.module.model.chosen
    engine.micro_step(inputs, labels, 1.0, last=True)
    engine.optimizer_step(SETTINGS, 1.0)
    before = engine.exchanged_bytes
    inputs[:, 0] = engine.module.model.chosen + 1
    with pytest.raises(
        BatchscapeError, match=r"model\.expert\.weight and model\.expert\.bias\. Add"
    ):
        engine.micro_step(inputs, labels, 1.0, last=True)
    assert before > 0
    engine.close()


@pytest.mark.usefixtures("trainer", "group_of_one")
def test_finding_out_what_has_no_gradient_leaves_no_trace(spec_of):
    engine = engine_of(spec_of(model=OWN | {"_target_": "own_models.Normalised"}), world_size=2)
    inputs, labels = batch()
    before = torch.get_rng_state()
    engine.micro_step(inputs, labels, 1.0, last=True)
    assert int(engine.module.model.norm.num_batches_tracked) == 1
    assert torch.equal(torch.get_rng_state(), before)
    assert not engine._adds_zeros
    engine.close()
