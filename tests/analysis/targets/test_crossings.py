"""Steps to target against a plain loop over each curve, and laws that hold for any curve."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.errors import AnalysisError


def curve(
    losses: list[float], run: int = 0, batch: int = 16, every: int = 10, status: str = "completed"
) -> pd.DataFrame:
    step = np.arange(len(losses)) * every
    return pd.DataFrame(
        {
            "run": run,
            "global_batch_size": batch,
            "seed": 0,
            "optimizer_step": step,
            "samples": step * batch,
            "tokens": step * batch * 8,
            "train_time_s": step * 0.5,
            "loss": losses,
            "status": status,
        }
    )


def reach(losses: list[float], target: float, **options: str) -> pd.Series:
    crossing = options.pop("crossing", "sustained")
    return steps_to_target(curve(losses, **options), [target], crossing=crossing).iloc[0]


def plainly(losses: list[float], target: float, crossing: str) -> tuple[float, float, float]:
    """Steps, and both ends of the bracket, for measurements every 10 steps; by a loop."""
    met = [bool(loss <= target) for loss in losses]
    if crossing == "first":
        at = met.index(True) if any(met) else None
    else:
        at = None
        for index in reversed(range(len(met))):
            if not met[index]:
                break
            at = index
    if at is None or not math.isfinite(losses[-1]):
        return math.nan, math.nan, math.nan
    before, after = losses[at - 1], losses[at]
    if not math.isfinite(before):
        return 10.0 * at, 10.0 * (at - 1), 10.0 * at
    share = (before - target) / (before - after)
    low, high = 10.0 * (at - 1), 10.0 * at
    if low == 0:
        return low + share * (high - low), low, high
    return math.exp(math.log(low) + share * (math.log(high) - math.log(low))), low, high


numbers = st.floats(0.1, 5.0) | st.sampled_from([1.0, 2.0, math.nan, math.inf])


@given(st.lists(numbers, min_size=1, max_size=12), st.sampled_from(["first", "sustained"]))
@example([1.0] * 9 + [math.nan, 1.0], "sustained")  # once one part in 10^16 beyond the bracket
def test_crossings_are_those_of_a_plain_loop(losses, crossing):
    losses = [6.0, *losses]
    row = reach(losses, 2.0, crossing=crossing)
    steps, low, high = plainly(losses, 2.0, crossing)
    if math.isnan(steps):
        assert row["outcome"] == ("censored" if math.isfinite(losses[-1]) else "diverged")
        assert math.isnan(row["steps_to_target"])
        assert math.isinf(row["steps_high"])
        return
    assert row["outcome"] == "reached"
    assert row["steps_to_target"] == pytest.approx(steps, rel=1e-12)
    assert (row["steps_low"], row["steps_high"]) == (low, high)
    assert low <= row["steps_to_target"] <= high
    first, *_ = plainly(losses, 2.0, "first")
    assert row["first_steps_to_target"] == pytest.approx(first, rel=1e-12)
    assert row["samples_to_target"] == pytest.approx(16 * steps)
    assert row["tokens_to_target"] == pytest.approx(128 * steps)
    assert row["time_to_target_s"] == pytest.approx(0.5 * steps)
    assert row["interpolation_error"] == pytest.approx((high - low) / 2 / steps)


def test_a_target_is_met_at_equality():
    row = reach([6.0, 3.0, 2.0, 1.0], 2.0)
    assert row["steps_to_target"] == 20.0
    assert row["confirmed_by"] == 1


@pytest.mark.parametrize(
    ("losses", "status", "outcome", "low"),
    [
        ([6.0, 3.0, 2.5], "completed", "censored", 20.0),
        ([6.0, 3.0, 2.5], "pruned", "pruned", 20.0),
        ([6.0, 3.0, 2.5], "diverged", "diverged", math.inf),
        ([6.0, 1.0, math.nan], "completed", "diverged", math.inf),
        ([6.0, 1.0, 1.0], "diverged", "diverged", math.inf),
        ([6.0, 1.0, 3.0], "completed", "censored", 20.0),
        ([6.0], "oom", "censored", 0.0),
        ([math.nan], "failed", "censored", 0.0),
        ([math.nan], "diverged", "diverged", math.inf),
    ],
)
def test_what_did_not_reach_is_a_bound(losses, status, outcome, low):
    row = reach(losses, 2.0, status=status)
    assert (row["outcome"], row["steps_low"], row["steps_high"]) == (outcome, low, math.inf)
    assert row[["steps_to_target", "samples_to_target", "time_to_target_s"]].isna().all()


def test_runs_are_told_apart_and_each_target_has_its_rows():
    curves = pd.concat([curve([6.0, 3.0, 1.0], run=1, batch=8), curve([6.0, 5.0, 4.5], run=0)])
    reaches = steps_to_target(curves, [2.0, 5.5])
    assert reaches[["target_loss", "run", "outcome"]].values.tolist() == [
        [5.5, 1, "reached"],
        [5.5, 0, "reached"],
        [2.0, 1, "reached"],
        [2.0, 0, "censored"],
    ]
    assert reaches["global_batch_size"].tolist() == [8, 16, 8, 16]


def test_a_curve_that_begins_below_its_target_gives_an_upper_bound():
    reaches = steps_to_target(curve([9.0, 1.0, 0.9]).iloc[1:], [2.0]).iloc[0]
    assert (reaches["steps_low"], reaches["steps_to_target"]) == (0.0, 10.0)
    assert reaches["interpolation_error"] == 0.5


def test_bad_targets_and_tables_are_refused():
    good = curve([6.0, 3.0, 1.0])
    with pytest.raises(AnalysisError, match="met before the first optimizer step"):
        steps_to_target(good, [6.5])
    for targets in ([], [math.nan], [math.inf]):
        with pytest.raises(AnalysisError, match="finite losses"):
            steps_to_target(good, targets)
    with pytest.raises(AnalysisError, match="one of sustained, first, first_evaluation, got"):
        steps_to_target(good, [2.0], crossing="last")  # type: ignore[arg-type]
    with pytest.raises(AnalysisError, match="curves needs the columns loss; it has: run"):
        steps_to_target(good.drop(columns="loss"), [2.0])
    with pytest.raises(AnalysisError, match="run 0 has several at step 10"):
        steps_to_target(pd.concat([good, good.iloc[[1]]]), [2.0])
    with pytest.raises(AnalysisError, match="one value of each setting; run 0 has several of seed"):
        steps_to_target(good.assign(seed=[0, 1, 1]), [2.0])
    with pytest.raises(AnalysisError, match="optimizer_step is a finite number in every row"):
        steps_to_target(good.assign(optimizer_step=[-1, 10, 20]), [2.0])
    with pytest.raises(AnalysisError, match="needs optimizer_step or samples"):
        steps_to_target(good.drop(columns=["optimizer_step", "samples"]), [2.0])


def test_steps_follow_from_samples_where_only_those_are_known():
    both = steps_to_target(curve([6.0, 3.0, 1.0]), [2.0])
    alone = steps_to_target(curve([6.0, 3.0, 1.0]).drop(columns="optimizer_step"), [2.0])
    assert both["steps_to_target"].tolist() == alone["steps_to_target"].tolist()


def test_the_first_evaluation_scores_as_algoperf_does():
    """`get_index_that_reaches_target`: the first index at or below, whatever comes after."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        losses = [5.0, *rng.uniform(1, 4, 12)]
        if rng.random() < 0.5:
            losses[-1] = math.nan
        target = float(rng.uniform(1, 3))
        met = np.asarray(losses) <= target
        row = reach(losses, target, crossing="first_evaluation")
        if not met.any():
            assert row["outcome"] == ("diverged" if math.isnan(losses[-1]) else "censored")
            continue
        at = int(np.argmax(met))
        assert row["outcome"] == "reached"
        assert row["steps_to_target"] == 10 * at
        assert row["time_to_target_s"] == 5.0 * at
        assert (row["steps_low"], row["steps_high"]) == (10 * (at - 1), 10 * at)
