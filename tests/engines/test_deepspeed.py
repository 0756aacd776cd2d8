"""The DeepSpeed engine: beside what every engine passes, what is its own."""

from __future__ import annotations

import copy
import gc
import os
import weakref

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist

from batchscape.config import AdamW
from batchscape.errors import BatchscapeError
from batchscape.geometry import BatchGeometry
from batchscape.models.build import build_model
from batchscape.record.tables import read_table
from exact import assert_same_rows

pytest.importorskip("deepspeed", reason="batchscape[deepspeed]")
pytestmark = [
    pytest.mark.systems,
    pytest.mark.timeout(400),
    # The library decorates functions with torch.compile; the import behind it says so of PyTorch.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

STAGES = [0, 1, 2, 3]
KINDS = [0, 2, 3]
"""Stages of which each is another class of the library; stage 1 has that of stage 2."""
SETTINGS = AdamW(name="adamw", learning_rate=0.01, gradient_clip_norm=0.5)
ALONE = BatchGeometry(1, 1, 2, 4)


def deepspeed(stage, **more):
    return {"name": "deepspeed", "precision": "float32", "zero_stage": stage, **more}


@pytest.fixture
def engine_of(spec_of):
    """Build engines of a rank alone, and close them."""
    from batchscape.engines.deepspeed import DeepSpeedEngine

    built = []

    def build(stage, geometry=ALONE, optimizer=SETTINGS, **overrides):
        spec = spec_of(engine=deepspeed(stage), **overrides)
        module = build_model(spec.config, spec.data, "float32")
        engine = DeepSpeedEngine(module, spec.config.engine, optimizer, "float32", geometry)
        built.append(engine)
        return engine

    yield build
    for engine in built:
        if not isinstance(engine.module, torch.nn.Identity):
            engine.close()


def batch(seed=3, count=8):
    tokens = torch.randint(256, (count, 33), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def step(engine, seed=3, weight=1 / 256, settings=SETTINGS):
    """Four micro-steps and an update; return the norm of the gradient."""
    inputs, labels = batch(seed)
    for a in range(4):
        part = slice(2 * a, 2 * a + 2)
        engine.micro_step(inputs[part], labels[part], weight, last=a == 3)
    return float(engine.optimizer_step(settings, 1.0))


def weights(engine):
    """Whole weights, wherever they lie."""
    return engine.state()["model"]


@pytest.fixture(scope="module")
def trained(trainer, tmp_path_factory):
    """Train once by each stage, or by DDP, with samples of the noise; the folders are read only."""
    done = {}

    def of(stage):
        if stage not in done:
            ddp = {"name": "ddp", "precision": "float32"}
            spec = trainer.make_spec(
                (2, 4, 4),
                engine=ddp if stage is None else deepspeed(stage),
                measure={"memory": False, "noise_scale_every": 3},
                budget__optimizer_steps=6,
            )
            done[stage] = trainer.train(spec, tmp_path_factory.mktemp("trained"))
        return done[stage]

    return of


def test_a_killed_run_of_two_ranks_resumes_bit_for_bit(trainer, steps, tmp_path):
    """As one trains that writes no checkpoint."""
    without, spec = (
        trainer.make_spec(
            (2, 8, 2),
            engine=deepspeed(3),
            budget__optimizer_steps=12,
            checkpoint__every_s=every_s,
            data__sequence_length=16,
        )
        for every_s in (None, 0.0)
    )
    undisturbed = steps(trainer.train(without, tmp_path / "whole"))
    root = tmp_path / "killed"
    folder = trainer.start(spec, root, entry="faulty_workers:hanging")
    while not all((folder.path / f"hangs-{rank}").exists() for rank in (0, 1)):
        assert not trainer._server_of(spec).wait(0.05), folder.log.read_text()
    trainer.kill(spec)
    trainer.train(spec, root, attempt=1)
    rows = steps(folder)
    assert set(rows["attempt"]) == {0, 1}
    measured = ["optimizer_step", "samples", "loss", "gradient_norm"]
    assert_same_rows(rows[measured], undisturbed[measured])


@pytest.mark.parametrize("stage", KINDS)
def test_the_noise_is_sampled_from_each_ranks_own_gradients(trained, steps, stage):
    sampled = []
    for engine in (None, stage):
        folder = trained(engine)
        assert folder.log.read_text() == "", "the library is to be quiet"
        rows = steps(folder)
        sampled.append(rows["small_gradient_square"].dropna().astype(float))
    assert len(sampled[0]) == 2
    pd.testing.assert_series_equal(*sampled, rtol=1e-4)


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (2, {"evaluation__ema_half_life_tokens": 4096}),
        (0, {"optimizer": {"name": "muon", "learning_rate": 0.01}}),
        (3, {"engine__activation_checkpointing": True}),
    ],
    ids=str,
)
def test_settings_beside_the_engine_do_what_they_do_in_ddp(trainer, tmp_path, stage, more):
    more = {"evaluation__every_samples": 64, "budget__optimizer_steps": 4, **more}
    tables = []
    for engine in ({"name": "ddp", "precision": "float32"}, deepspeed(stage)):
        spec = trainer.make_spec((2, 8, 2), **{"engine": engine, **more})
        evals = read_table(trainer.train(spec, tmp_path / engine["name"]), "evals")
        columns = [name for name in ("eval_loss", "raw_eval_loss") if evals[name].notna().all()]
        tables.append(evals[columns].astype(float))
    pd.testing.assert_frame_equal(*tables, rtol=0, atol=1e-4)


def test_running_means_are_those_of_ddp(trainer, tmp_path):
    """Else every rank would evaluate a model of its own."""
    model = {"name": "custom", "arguments": {}, "_target_": "engine_models.Normalises"}
    more = {"model": model, "budget__optimizer_steps": 3, "evaluation__every_samples": 16}
    tables = []
    for engine in ({"name": "ddp", "precision": "float32"}, *map(deepspeed, KINDS)):
        spec = trainer.make_spec((2, 4, 2), engine=engine, **more)
        evals = read_table(trainer.train(spec, tmp_path / str(len(tables))), "evals")
        tables.append(evals["eval_loss"].astype(float))
    for of_a_stage in tables[1:]:
        pd.testing.assert_series_equal(of_a_stage, tables[0], rtol=1e-5)


@pytest.mark.parametrize("stage", KINDS)
def test_forgotten_micro_steps_leave_no_trace(engine_of, stage):
    trained = []
    for forgets in (False, True):
        torch.manual_seed(0)
        engine = engine_of(stage)
        step(engine)
        if forgets:
            inputs, labels = batch(seed=5)
            engine.micro_step(inputs, labels, 1.0, last=False)
            engine.micro_step(inputs, labels, 1.0, last=False)
            engine.forget_gradients()
        step(engine)
        trained.append(copy.deepcopy(weights(engine)))
        engine.close()
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


@pytest.mark.parametrize("stage", KINDS)
def test_state_goes_through_a_file_of_plain_data(engine_of, tmp_path, stage):
    first = engine_of(stage)
    step(first)
    torch.save(first.state(), tmp_path / "state.pt")
    step(first)
    after = copy.deepcopy(weights(first))
    first.close()
    second = engine_of(stage, seed=1)
    second.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    step(second)
    assert all(torch.equal(after[name], weights(second)[name]) for name in after)


@pytest.mark.parametrize("stage", KINDS)
def test_settings_of_a_step_reach_the_update(engine_of, stage):
    """Neither rate nor clipping are those that the library was configured with."""
    engine = engine_of(stage)
    before = copy.deepcopy(weights(engine))
    plain = AdamW(name="adamw", learning_rate=0.01, gradient_clip_norm=None)
    assert step(engine, settings=plain) == pytest.approx(step(engine), rel=0.5)
    still = AdamW(name="adamw", learning_rate=1e-30, gradient_clip_norm=1e-3)
    moved = copy.deepcopy(weights(engine))
    step(engine, settings=still)
    assert any(not torch.equal(before[name], moved[name]) for name in before)
    assert all(torch.equal(moved[name], weights(engine)[name]) for name in before)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_update_that_is_not_finite_is_skipped_and_told_of(engine_of, stage):
    engine = engine_of(stage)
    step(engine)
    assert not engine.skipped
    assert engine.exchanged_bytes == 0
    before = copy.deepcopy(weights(engine))
    assert not np.isfinite(step(engine, weight=float("inf")))
    assert engine.skipped
    assert all(torch.equal(before[name], weights(engine)[name]) for name in before)
    assert np.isfinite(step(engine))
    assert not engine.skipped


@pytest.mark.usefixtures("trainer")
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_without_a_gradient_have_zeros_or_are_refused(engine_of, stage):
    model = {"name": "custom", "arguments": {}, "_target_": "own_models.Spare"}
    engine = engine_of(stage, model=model)
    if stage < 2:
        assert np.isfinite(step(engine))
        return
    with pytest.raises(BatchscapeError, match=rf"zero_stage={stage} every.*use\n?.*zero_stage=0"):
        step(engine)


@pytest.mark.parametrize("stage", KINDS)
def test_closing_leaves_nothing_behind(engine_of, stage):
    import deepspeed.comm

    before = dict(os.environ)
    linear = torch.nn.functional.linear
    for _ in range(2):
        engine = engine_of(stage)
        step(engine)
        module = weakref.ref(engine.module)
        parameters = [weakref.ref(p) for p in engine.module.parameters()]
        engine.close()
        gc.collect()
        assert module() is None
        assert not any(p() is not None for p in parameters)
    changed = {name for name in before if os.environ.get(name) != before[name]}
    assert changed <= {"DS_ACCELERATOR"}
    assert "LOCAL_RANK" not in os.environ
    assert not dist.is_initialized()
    assert torch.nn.functional.linear is linear
    assert not {"all_reduce", "reduce_scatter_tensor"} & vars(deepspeed.comm.comm.cdb).keys()


def test_nothing_is_compiled_for_the_cpu(engine_of, tmp_path, monkeypatch):
    """As in a new process, where the library has no backend and has not been told."""
    import deepspeed.comm

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", None)
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    engine = engine_of(1)
    step(engine)
    engine.close()
    assert not list(tmp_path.iterdir())
