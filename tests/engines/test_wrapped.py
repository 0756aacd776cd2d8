"""Engines that put a library's objects around DDP: what they undo, and what they leave alone."""

from __future__ import annotations

import copy
import os
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from batchscape.engines import build_engine
from batchscape.models.build import build_model

pytestmark = pytest.mark.systems

LIBRARIES = ["accelerate", "fabric"]
OWN = {"name": "custom", "arguments": {}}
CPU = torch.device("cpu")


@pytest.fixture(params=LIBRARIES)
def library(request):
    pytest.importorskip({"fabric": "lightning_fabric"}.get(request.param, request.param))
    return request.param


def with_engine(name, precision="float64", **settings):
    return {"engine": {"name": name, "precision": precision, **settings}}


def batch(count=12):
    tokens = torch.randint(256, (count, 33), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(module):
    return [p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize(("accumulation", "micro_steps"), [(3, 2), (4, 6)])
def test_a_gradient_is_that_of_the_whole_batch(library, spec_of, accumulation, micro_steps):
    """Whatever the library divides by, and whether or not the micro-steps are as many."""
    spec = spec_of((1, 12 // accumulation, accumulation), **with_engine(library))
    inputs, labels = batch()
    plain = build_model(spec.config, spec.data, "float64")
    (plain(inputs, labels)[0] / labels.numel()).backward()
    engine = build_engine(spec, CPU)
    size = 12 // micro_steps
    for a in range(micro_steps):
        cut = slice(a * size, (a + 1) * size)
        engine.micro_step(inputs[cut], labels[cut], 1 / 384, last=a == micro_steps - 1)
    for mine, theirs in zip(gradients(engine.module), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-15)
    engine.close()


@pytest.mark.parametrize(
    ("optimizer", "precision", "clip"),
    [
        ("muon", "float64", 0.5),
        ("adamw", "bfloat16", None),
        ("adamw", "float16", 0.5),
    ],
)
def test_steps_and_checkpoints_are_those_of_ddp(library, spec_of, optimizer, precision, clip):
    """Clipped or not, with an overflow, and as well after a checkpoint of the other engine."""
    if (library, precision) == ("accelerate", "float16"):
        pytest.skip("refused on a CPU")
    settings = {"name": optimizer, "learning_rate": 0.01, "gradient_clip_norm": clip}
    inputs, labels = batch()
    engines = {
        name: build_engine(
            spec_of((1, 12, 1), optimizer=settings, **with_engine(name, precision)), CPU
        )
        for name in ("ddp", library)
    }
    spec = spec_of((1, 12, 1), optimizer=settings, **with_engine(library, precision))
    rtol = {"float64": 1e-10, "bfloat16": 1e-4, "float16": 1e-3}[precision]

    def step(engine, weight):
        loss = engine.micro_step(inputs, labels, weight, last=True)
        norm = engine.optimizer_step(spec.config.optimizer, 0.5)
        return loss.item(), norm.item(), float(engine.gradient_scale), bool(engine.skipped)

    weights = [1 / 384, 1e30 if precision == "float16" else 1 / 384, 1 / 384]
    for weight in weights:
        ours, theirs = (step(engine, weight) for engine in engines.values())
        np.testing.assert_allclose(theirs, ours, rtol=rtol)
    engines["resumed"] = build_engine(spec, CPU)
    engines["resumed"].restore(copy.deepcopy(engines[library].state()))
    last, resumed = (step(engines[name], 1 / 384) for name in (library, "resumed"))
    assert resumed == last
    crossed = build_engine(spec, CPU)
    crossed.restore(copy.deepcopy(engines["ddp"].state()))
    np.testing.assert_allclose(step(crossed, 1 / 384), step(engines["ddp"], 1 / 384), rtol=rtol)
    for engine in [*engines.values(), crossed]:
        engine.close()


def test_what_surrounds_a_run_is_not_the_librarys(library, spec_of, monkeypatch):
    """No launcher's variables are read, none are left behind, and the threads are ours."""
    for name, value in {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7",
        "LT_PRECISION": "bf16-mixed",
        "LT_DEVICES": "4",
        "LT_CLI_USED": "1",
        "WORLD_SIZE": "4",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "PMI_SIZE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, threads = dict(os.environ), torch.get_num_threads()
    spec = spec_of((1, 4, 3), **with_engine(library))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = build_engine(spec, CPU)
    assert dict(os.environ) == before
    assert torch.get_num_threads() == threads
    assert engine.reported().data_parallel_size == 1
    assert engine.reported().gradient_accumulation_steps in {None, 3}
    inputs, labels = batch()
    assert engine.micro_step(inputs, labels, 1.0, last=True).dtype == torch.float64
    assert {p.grad.dtype for p in engine.module.parameters()} == {torch.float64}
    engine.close()


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


def test_a_rank_alone_tells_of_its_gradients_only(library, spec_of):
    engine = build_engine(spec_of((1, 4, 3), **with_engine(library)), CPU)
    engine.marks = marks = RecordedMarks()
    for last in (False, False, True):
        engine.micro_step(*batch(4), 1.0, last=last)
    assert marks.order == ["gradients ready"]
    assert engine.exchanged_bytes == engine.gradient_bytes == 0
    engine.close()


def test_nothing_lives_on_after_an_engine(library, spec_of):
    """Engines follow one another in a process, with other settings and other models."""
    import gc
    import weakref

    for precision, accumulation in [("bfloat16", 3), ("float64", 4)]:
        spec = spec_of((1, 1, accumulation), **with_engine(library, precision))
        engine = build_engine(spec, CPU)
        assert engine.reported().gradient_accumulation_steps in {None, accumulation}
        engine.micro_step(*batch(1), 1.0, last=True)
        engine.optimizer_step(spec.config.optimizer, 1.0)
        model = weakref.ref(engine.module)
        engine.close()
        del engine
        gc.collect()
        assert model() is None


@pytest.fixture(scope="module")
def reference(trainer, tmp_path_factory):
    """Steps of one rank that trains without a library."""
    from batchscape.record.tables import read_table

    spec = trainer.make_spec(
        (1, 24, 1), model=OWN | {"_target_": "own_models.Routed"}, budget__optimizer_steps=4
    )
    return read_table(trainer.train(spec, tmp_path_factory.mktemp("reference")), "steps")


def test_parameters_without_a_gradient_have_one_of_zero(
    library, trainer, steps, reference, tmp_path
):
    spec = trainer.make_spec(
        (2, 4, 3),
        model=OWN | {"_target_": "own_models.Routed"},
        **with_engine(library),
        budget__optimizer_steps=4,
    )
    folder = trainer.train(spec, tmp_path)
    table = steps(folder)
    for column in ("loss", "gradient_norm"):
        np.testing.assert_allclose(
            table[column].to_numpy(float), reference[column].to_numpy(float), rtol=1e-9
        )
    assert (table["exchange_span_s"] >= table["exchange_s"]).all()
    assert (table["exchange_s"] > 0).all()
    assert "Warning" not in folder.log.read_text()


def test_ranks_that_the_library_does_not_see_are_refused(library, trainer, outcome, tmp_path):
    """A library that is told of no other rank trains alone and says nothing."""
    spec = trainer.make_spec((2, 4, 3), **with_engine(library), budget__optimizer_steps=2)
    folder = trainer.start(spec, tmp_path, entry="unlaunched_workers:main")
    assert trainer.wait(spec) == [1, 1]
    for rank in (0, 1):
        ended = outcome(folder, rank)
        assert ended["status"] == "failed"
        assert ended["optimizer_step"] == 0
        assert "data_parallel_size" in ended["reason"]


@pytest.fixture
def group_of_one(tmp_path):
    """A process group, for an engine that finds no other rank in it."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("trainer", "group_of_one")
def test_an_exchange_is_told_of_once_a_step_and_in_order(library, spec_of):
    engine = build_engine(spec_of((1, 4, 3), **with_engine(library)), CPU)
    engine.marks = marks = RecordedMarks()
    for _ in range(2):  # DDP builds its buckets anew after the first step
        engine.micro_step(*batch(4), 1.0, last=True)
        engine.optimizer_step(spec_of().config.optimizer, 1.0)
    assert marks.order == ["exchange begins", "gradients ready", "exchange ends"] * 2
    assert engine.exchanged_bytes == 2 * engine.gradient_bytes > 0
    engine.close()
