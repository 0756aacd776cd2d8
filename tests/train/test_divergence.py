"""When a training counts as diverged: the rule against a plain one, and real trainings."""

from __future__ import annotations

import json
import math
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.train import divergence
from batchscape.train.divergence import DivergenceRule

LOSSES = st.lists(
    st.sampled_from([0.5, 1.0, 4.9, 5.1, 9.0, 60.0, 1e300, math.nan, math.inf]) | st.floats(0, 100),
    max_size=60,
)


def plainly(losses: list[float], factor: float, steps: int) -> int | None:
    """Return the step of divergence, looking at the whole curve up to every step anew."""
    for k in range(1, len(losses) + 1):
        losses_so_far = losses[:k]
        if not math.isfinite(losses_so_far[-1]):
            return k
        if k < steps:
            continue
        # Every step by the level that was known then.
        too_high = [
            min(losses_so_far[: min(10, j)]) > 0
            and losses_so_far[j - 1] > factor * min(losses_so_far[: min(10, j)])
            for j in range(k - steps + 1, k + 1)
        ]
        if all(too_high):
            return k
    return None


@given(LOSSES, st.sampled_from([1.5, 10.0]), st.integers(1, 8), st.integers(0, 60))
def test_the_rule_is_the_one_that_is_stated(losses, factor, steps, cut):
    """Also across a resume after `cut` steps, whose state went through a checkpoint."""
    with mock.patch.multiple(divergence, FACTOR=factor, STEPS=steps):
        assert judged(losses, cut) == plainly(losses, factor, steps)


def judged(losses: list[float], cut: int) -> int | None:
    rule = DivergenceRule()
    for k, loss in enumerate(losses, start=1):
        if k == cut + 1:
            state = json.loads(json.dumps(rule.state()))
            rule = DivergenceRule()
            rule.restore(state)
        if rule.judge(k, loss, norm_is_finite=True) is not None:
            return k
    return None


def test_reasons(monkeypatch):
    monkeypatch.setattr(divergence, "STEPS", 2)
    rule = DivergenceRule()
    assert rule.judge(1, 5.5, norm_is_finite=True) is None
    assert rule.judge(2, 56.0, norm_is_finite=True) is None
    assert rule.judge(3, 560.0, norm_is_finite=True) == (
        "the loss exploded: 560 at optimizer step 3, the last of 2 in a row above 10 x 5.5, the "
        "lowest loss of the first 10"
    )
    reason = rule.judge(4, 1.0, norm_is_finite=False)
    assert reason == "the gradient norm of optimizer step 4 is not finite"
    reason = rule.judge(5, math.nan, norm_is_finite=False)
    assert reason == "the loss of optimizer step 5 is not finite"


def exploding(trainer, geometry):
    """A training whose loss is some hundred times as high from its second step on."""
    return trainer.make_spec(
        geometry,
        optimizer={"name": "sgd", "learning_rate": 1000.0, "gradient_clip_norm": 1.0},
        schedule={"name": "constant"},
        budget__optimizer_steps=200,
        checkpoint={"every_s": None},
    )


def test_an_explosion_is_divergence_at_the_same_step_on_every_rank(
    trainer, outcome, steps, tmp_path
):
    folder = trainer.train(exploding(trainer, (2, 4, 1)), tmp_path)
    k = plainly(steps(folder)["loss"].astype(float).tolist(), 10.0, 20)
    assert k is not None
    assert k >= 20
    for rank in range(2):
        ended = outcome(folder, rank)
        assert (ended["status"], ended["cause"]) == ("diverged", "divergence")
        assert ended["reason"].startswith("the loss exploded: ")
        step = f" at optimizer step {k}, the last of 20 in a row above 10 x 5."
        assert step in ended["reason"]


@pytest.mark.slow
def test_a_norm_that_one_rank_alone_finds_bad_ends_all_of_them(trainer, outcome, tmp_path):
    spec = trainer.make_spec((2, 4, 1), budget__optimizer_steps=400)
    folder = trainer.train(spec, tmp_path, entry="faulty_workers:lopsided")
    for rank in range(2):
        assert outcome(folder, rank)["status"] == "diverged"
        reason = "the gradient norm of optimizer step 6 is not finite"
        assert outcome(folder, rank)["reason"] == reason


@pytest.mark.slow
def test_a_resumed_run_diverges_where_the_whole_one_does(trainer, outcome, tmp_path):
    """Stopped after it had become too high, and before that was so for long enough."""
    spec = exploding(trainer, (1, 8, 1))
    undisturbed = trainer.train(spec, tmp_path / "whole")
    assert outcome(undisturbed)["reason"].startswith("the loss exploded: ")
    folder = trainer.start(spec, tmp_path / "cut", entry="faulty_workers:waiting")
    deadline = time.monotonic() + 100
    while not Path(folder.path / "hangs-0").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    trainer.kill(spec, signal.SIGTERM)
    assert outcome(folder)["status"] == "interrupted"
    folder.outcome(0).unlink()
    trainer.train(spec, tmp_path / "cut", attempt=1)
    assert "going on after optimizer step" in folder.log.read_text()
    assert outcome(folder)["reason"] == outcome(undisturbed)["reason"]
