"""FSDP2 where it is not like the other engines; what they share is in test_contract.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchscape.engines.fsdp import fsdp_engine
from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry
from batchscape.models.build import build_model
from batchscape.record.tables import read_table
from batchscape.train.checkpoint import checkpoints, load_checkpoint
from exact import assert_same_rows

OWN = {"name": "custom", "arguments": {}}


def engine(name, **settings):
    return {"name": name, "precision": "float64", **settings}


def trained(trainer, root, geometry, settings, **overrides):
    overrides = {"budget__optimizer_steps": 6, **overrides}
    spec = trainer.make_spec(geometry, engine=settings, **overrides)
    return trainer.train(spec, root / settings["name"])


def assert_alike(one, other, table="steps", columns=("loss", "gradient_norm")):
    first, second = read_table(one, table), read_table(other, table)
    for column in columns:
        np.testing.assert_allclose(
            first[column].to_numpy(float), second[column].to_numpy(float), rtol=1e-9
        )


@pytest.mark.parametrize(
    ("geometry", "settings"),
    [
        ((2, 4, 2), {"activation_checkpointing": True}),
        pytest.param((2, 8, 1), {"reshard_after_forward": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_ranks_train_like_one(trainer, tmp_path, geometry, settings):
    one = trained(trainer, tmp_path, (1, 16, 1), engine("ddp"))
    two = trained(trainer, tmp_path, geometry, engine("fsdp", **settings))
    assert_alike(one, two)
    assert not (two.path / "gradient_sketch.npy").exists()


@pytest.mark.slow
def test_uneven_parts_and_averages_are_evaluated_alike_and_go_on(trainer, steps, tmp_path):
    """Three ranks divide few sizes of the model, and not the five batches of an evaluation.

    For a checkpoint their parts are gathered, and cut again, bit for bit.
    """
    more = {
        "evaluation__samples": 40,
        "evaluation__every_samples": 24,
        "evaluation__ema_half_life_tokens": 1024.0,
    }
    one = trained(trainer, tmp_path, (1, 12, 1), engine("ddp"), **more)
    three = trained(trainer, tmp_path, (3, 2, 2), engine("fsdp"), **more)
    assert_alike(one, three)
    assert_alike(one, three, "evals", ("eval_loss", "raw_eval_loss", "eval_labels"))
    evals = read_table(three, "evals")
    assert (evals["eval_loss"] != evals["raw_eval_loss"]).iloc[1:].all()
    cut = stopped_and_resumed(trainer, tmp_path / "cut", (3, 2, 2), **more)
    assert steps(cut)["attempt"].nunique() == 2
    for table, columns in {"steps": ["loss", "gradient_norm"], "evals": ["eval_loss"]}.items():
        assert_same_rows(read_table(cut, table)[columns], read_table(three, table)[columns])


def stopped_and_resumed(trainer, root, geometry, **more):
    """Stop a run of six optimizer steps after the third, and go on."""
    spec = trainer.make_spec(geometry, engine=engine("fsdp"), budget__optimizer_steps=6, **more)
    folder = trainer.start(spec, root, entry="engine_witness:watched", STOP_AFTER="3")
    trainer.wait(spec)
    trainer.train(spec, root, attempt=1)
    return folder


@pytest.mark.slow
def test_running_means_are_those_of_ddp_and_of_a_run_that_was_stopped(trainer, steps, tmp_path):
    """Else every rank would evaluate a model of its own, and a checkpoint change it."""
    more = {
        "model": OWN | {"_target_": "engine_models.Normalises"},
        "evaluation__every_samples": 16,
    }
    ddp = trained(trainer, tmp_path, (2, 4, 2), engine("ddp"), **more)
    uncut = trained(trainer, tmp_path, (2, 4, 2), engine("fsdp"), **more)
    assert_alike(ddp, uncut, "evals", ("eval_loss",))
    cut = stopped_and_resumed(trainer, tmp_path / "cut", (2, 4, 2), **more)
    assert steps(cut)["attempt"].nunique() == 2
    of_cut, of_uncut = (
        read_table(folder, "evals")["eval_loss"].tolist() for folder in (cut, uncut)
    )
    assert of_cut == of_uncut


@pytest.mark.slow
def test_a_checkpoint_is_that_of_whole_models(trainer, tmp_path):
    """Names, shapes and content, of the model and of the optimizer."""
    states = []
    for settings in (engine("ddp"), engine("fsdp")):
        spec = trainer.make_spec((2, 4, 2), engine=settings)
        folder = trainer.start(
            spec, tmp_path / settings["name"], entry="engine_witness:watched", STOP_AFTER="3"
        )
        trainer.wait(spec)
        states.append(load_checkpoint(checkpoints(folder.checkpoints)[0]))
    ddp, fsdp = states
    assert ddp["model"].keys() == fsdp["model"].keys()
    pairs = [(ddp["model"][name], fsdp["model"][name]) for name in ddp["model"]]
    for index, entry in ddp["optimizer"]["state"].items():
        pairs += [(value, fsdp["optimizer"]["state"][index][name]) for name, value in entry.items()]
    assert len(pairs) > 50
    for one, other in pairs:
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-7, atol=1e-12)


@pytest.mark.slow
def test_parts_take_the_memory_of_parts(trainer, tmp_path):
    """After the model: half the parameters."""
    more = {"model__d_model": 64, "budget__optimizer_steps": 1}
    folder = trained(trainer, tmp_path, (2, 2, 2), engine("fsdp"), measure__memory=True, **more)
    ranks = read_table(folder, "ranks")
    assert (ranks["memory_method"] == "cpu allocator events").all()
    spec = trainer.make_spec(model__d_model=64)
    module = build_model(spec.config, spec.data, "float64")
    half = sum(p.nbytes for p in module.parameters()) / 2
    assert ranks["allocated_after_model_gib"].max() * 2**30 == pytest.approx(half, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_noise_is_sampled_where_gradients_are_seen(trainer, steps, tmp_path, ranks):
    folder = trained(trainer, tmp_path, (ranks, 4, 2), engine("fsdp"), measure__noise_scale_every=3)
    sampled = steps(folder)["small_batch_size"].notna().sum()
    assert sampled == (2 if ranks == 1 else 0)


@pytest.mark.slow
def test_parameters_without_a_gradient_have_one_of_zero(trainer, tmp_path):
    """Whichever ranks have used them."""
    model = OWN | {"_target_": "own_models.Routed"}
    one = trained(trainer, tmp_path, (1, 8, 1), engine("ddp"), model=model)
    two = trained(trainer, tmp_path, (2, 2, 2), engine("fsdp"), model=model)
    assert_alike(one, two)


@pytest.mark.slow
def test_a_block_that_is_left_out_is_refused(trainer, outcome, tmp_path):
    spec = trainer.make_spec(
        (2, 2, 2), engine=engine("fsdp"), model=OWN | {"_target_": "engine_models.SkipsABlock"}
    )
    folder = trainer.start(spec, tmp_path)
    trainer.wait(spec)
    ended = outcome(folder)
    assert ended["status"] == "failed"
    assert "every block must be used in every forward" in ended["reason"]


@pytest.mark.usefixtures("trainer")
def test_a_parameter_without_dimensions_is_refused(spec_of):
    spec = spec_of(engine=engine("fsdp"), model=OWN | {"_target_": "engine_models.HasAScale"})
    module = build_model(spec.config, spec.data, "float64")
    with pytest.raises(ConfigError, match=r"contiguous, but not model\.scale of this model"):
        fsdp_engine(
            module,
            spec.config.engine,
            spec.config.optimizer,
            "float64",
            BatchGeometry(1, 2, 4, 1),
            device=torch.device("cpu"),
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_blocks_train_alike(trainer, tmp_path):
    """And the evaluation, of batches of another size, is not compiled for."""
    more = {
        "evaluation__batch_size": 5,
        "budget__optimizer_steps": 2,
        "model__n_layers": 1,
        "model__d_model": 16,
    }
    plain = trained(trainer, tmp_path / "plain", (2, 4, 1), engine("fsdp"), **more)
    compiled = trained(trainer, tmp_path, (1, 4, 2), engine("fsdp", compile=True), **more)
    assert_alike(plain, compiled)
    assert (read_table(compiled, "ranks")["compile_s"] > 0).all()


@pytest.mark.slow
def test_bfloat16_follows_float32(trainer, steps, tmp_path):
    losses = [
        steps(
            trained(
                trainer,
                tmp_path / precision,
                (2, 4, 2),
                {"name": "fsdp", "precision": precision},
                budget__optimizer_steps=4,
            )
        )["loss"].astype(float)
        for precision in ("float32", "bfloat16")
    ]
    assert 0 < (losses[1] - losses[0]).abs().max() < 5e-2


@pytest.mark.slow
def test_settings_of_logits_train_alike_in_parts(trainer, tmp_path):
    """A last matrix that ranks have parts of, with rows that no token is, loss by loss."""
    model = {"model__vocabulary_size": 320, "budget__optimizer_steps": 3}
    plain = trained(trainer, tmp_path / "plain", (1, 16, 1), engine("ddp"), **model)
    for name in ("ddp", "fsdp"):
        settings = {**model, "model__loss_chunk": 37}
        other = trained(trainer, tmp_path, (2, 4, 2), engine(name), **settings)
        assert_alike(plain, other)
