"""A run that was killed or stopped goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import dataclasses
import signal
import time

import pytest

from batchscape.geometry import BatchGeometry
from batchscape.record.spec import Stage
from batchscape.record.tables import read_table
from exact import assert_same_rows

TWO_RANKS = (2, 8, 2)
MEASURED = ["optimizer_step", "samples", "tokens", "loss", "learning_rate", "gradient_norm",
            "small_gradient_square"]  # fmt: skip


@pytest.fixture
def undisturbed(trainer, steps, tmp_path):
    def train(geometry, **overrides):
        spec = trainer.make_spec(geometry, **overrides)
        return steps(trainer.train(spec, tmp_path / "undisturbed"))[MEASURED]

    return train


def settings(**more):
    return {
        "engine__precision": "float32",
        "model": {"name": "gpt", "n_layers": 1, "n_heads": 2, "d_model": 16, "dropout": 0.1},
        "data__sequence_length": 16,
        "budget__optimizer_steps": 40,
        "checkpoint__every_s": 0.0,
        "evaluation__every_samples": 640,
        **more,
    }


# A request to stop is met within two drains, of at most 25 optimizer steps each.
LONG = {
    "checkpoint__every_s": None,
    "budget__optimizer_steps": 120,
    "evaluation__every_samples": 640,
}


def kill_past_checkpoint(trainer, spec, root):
    """Train three optimizer steps past the first checkpoint, and kill there for certain."""
    folder = trainer.start(spec, root, entry="faulty_workers:hanging")
    wait_until_it_hangs(spec, folder)
    assert set(trainer.kill(spec, signal.SIGKILL)) == {-signal.SIGKILL}
    return folder


def wait_until_it_hangs(spec, folder):
    deadline = time.monotonic() + 60
    while len(list(folder.path.glob("hangs-*"))) < spec.geometry.data_parallel_size:
        assert time.monotonic() < deadline, folder.log.read_text()
        time.sleep(0.005)


def checkpointed_step(folder):
    (checkpoint,) = folder.checkpoints.glob("step-*.pt")
    return int(checkpoint.name.split("-")[1])


def test_killed_run_resumes_bit_for_bit(trainer, steps, undisturbed, tmp_path):
    settled = settings(measure__noise_scale_every=3)
    spec = trainer.make_spec(TWO_RANKS, **settled)
    folder = kill_past_checkpoint(trainer, spec, tmp_path)
    done = checkpointed_step(folder)
    # The rows past the checkpoint are there, and must be dropped.
    assert steps(folder)["optimizer_step"].tolist() == list(range(1, done + 4))
    trainer.train(spec, tmp_path, attempt=1)
    rows = steps(folder)
    assert rows["attempt"].tolist() == [0] * done + [1] * (40 - done)
    assert_same_rows(rows[MEASURED], undisturbed(TWO_RANKS, **settled))
    assert rows["small_gradient_square"].notna().sum() == 13
    assert rows["train_time_s"].is_monotonic_increasing


@pytest.mark.slow
def test_stopped_run_leaves_a_checkpoint_of_its_last_step(
    trainer, steps, outcome, undisturbed, tmp_path
):
    spec = trainer.make_spec(TWO_RANKS, **settings(**LONG))
    folder = trainer.start(spec, tmp_path, entry="faulty_workers:waiting")
    wait_until_it_hangs(spec, folder)
    trainer.kill(spec, signal.SIGTERM)
    stopped = outcome(folder)
    assert stopped["status"] == "interrupted"
    assert checkpointed_step(folder) == stopped["optimizer_step"] < 120
    assert steps(folder)["optimizer_step"].iloc[-1] == stopped["optimizer_step"]
    trainer.train(spec, tmp_path, attempt=1)
    rows = steps(folder)
    assert_same_rows(rows[MEASURED], undisturbed(TWO_RANKS, **settings(**LONG)))


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_inside_a_ramp(trainer, steps, tmp_path):
    """With an average of the weights, which the checkpoint holds too."""
    plain = trainer.make_spec(
        (2, 8, 2),
        **settings(
            optimizer={"name": "muon", "learning_rate": 0.01},
            evaluation__every_samples=None,
            evaluation__ema_half_life_tokens=2000.0,
        ),
    )
    # One step of 16, then 32, then 64: killed in the second stage, at home in the third.
    grown = dataclasses.replace(plain.config.optimizer, learning_rate=0.02, beta2=0.9)
    spec = dataclasses.replace(
        plain,
        stages=(
            Stage(16, BatchGeometry(1, 2, 8, 1), plain.config.optimizer),
            Stage(20 * 32, BatchGeometry(1, 2, 8, 2), plain.config.optimizer),
            Stage(4 * 64, BatchGeometry(1, 2, 8, 4), grown),
        ),
    )
    folder = kill_past_checkpoint(trainer, spec, tmp_path)
    assert 1 <= checkpointed_step(folder) < 1 + 20 - 3
    trainer.train(spec, tmp_path, attempt=1)
    undisturbed_folder = trainer.train(spec, tmp_path / "undisturbed")
    rows = steps(folder)
    assert rows["attempt"].unique().tolist() == [0, 1]
    assert rows["global_batch_size"].tolist() == [16] + [32] * 20 + [64] * 4
    assert_same_rows(rows[MEASURED], steps(undisturbed_folder)[MEASURED])
    losses = ["samples", "eval_loss", "raw_eval_loss"]
    evals, expected = (read_table(f, "evals")[losses] for f in (folder, undisturbed_folder))
    assert_same_rows(evals, expected)
    assert (evals["eval_loss"] != evals["raw_eval_loss"]).iloc[1:].all()


@pytest.mark.slow
def test_checkpoint_of_another_run_is_refused(trainer, outcome, tmp_path):
    spec = trainer.make_spec((1, 16, 2), **settings())
    other = kill_past_checkpoint(trainer, spec, tmp_path / "other")
    mine = trainer.make_spec((1, 32, 1), **settings())
    folder_path = tmp_path / mine.run_id
    folder_path.mkdir()
    other.checkpoints.rename(folder_path / "checkpoints")
    folder = trainer.start(mine, tmp_path)
    assert trainer.wait(mine) == [1]
    assert f"holds checkpoints of run {spec.run_id}" in outcome(folder)["reason"]
