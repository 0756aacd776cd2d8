"""Paired differences of decompositions, and the verdicts on them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from batchscape.analysis import find_cells, load
from batchscape.analysis.equivalence.paired import (
    MARGINS,
    family_verdicts,
    judge_equivalence,
    paired_differences,
)
from batchscape.config import Measure

SEEDS = (0, 1, 2)
OFFSETS = {(1, 32, 1): 0.0, (1, 8, 4): 1e-4, (2, 8, 2): 0.1}


@pytest.fixture
def swept(build: Any) -> Any:
    """Three cuts of 32; the third trains otherwise by 0.1 nats. Losses end as they are told to."""

    def make(**settings: Any) -> Any:
        sweep = build()
        for seed in SEEDS:
            for geometry, offset in OFFSETS.items():
                end = 2.0 + 0.05 * seed + offset * (1 + 0.01 * seed)
                sweep.run(geometry, seed=seed, loss=lambda k, e=end: 0 * k + e, rounding=0.0,
                          **settings)  # fmt: skip
        return sweep

    return make


def cells_of(sweep: Any) -> Any:
    return find_cells(load(sweep.path).runs)


def test_the_margins_of_old_runs_are_the_defaults():
    for setting, margin in MARGINS.items():
        assert getattr(Measure(), setting.removeprefix("measure.")) == margin


def test_verdicts_from_run_folders(swept):
    pairs = paired_differences(cells_of(swept()))
    assert pairs["margin"].eq(0.005).all()
    judged = judge_equivalence(pairs)
    losses = judged[judged["quantity"] == "final_loss"].sort_values("cell")
    assert losses["verdict"].tolist() == ["equivalent", "different"]
    assert losses["n"].tolist() == [3, 3]
    assert losses["margin_stated"].all()
    assert losses["n_seeds"].tolist() == [3, 3]
    assert losses["seed_sd"].tolist() == pytest.approx([0.05, 0.05])
    expected = np.array([1.0, 1.01, 1.02])
    for offset, row in zip((1e-4, 0.1), losses.to_dict("records"), strict=True):
        interval = stats.ttest_1samp(offset * expected, 0).confidence_interval(0.9)
        assert (row["low"], row["high"]) == pytest.approx(tuple(interval), rel=1e-6)
        assert len(row["run_ids"].split()) == 3
    # Held-out losses of the builder do not depend on the geometry: equal to the last bit.
    evals = judged[judged["quantity"] == "final_eval_loss"]
    assert evals["verdict"].tolist() == ["equivalent"] * 2
    assert evals["smallest_margin"].tolist() == [0.0, 0.0]
    families = family_verdicts(judged).set_index("quantity")
    assert families["verdict"].to_dict() == {
        "final_eval_loss": "equivalent",
        "final_loss": "different",
    }
    assert families["n_decompositions"].tolist() == [2, 2]
    assert families.at["final_loss", "n_equivalent"] == 1


def test_one_of_many_is_different_only_after_correction():
    row = {"reference": 0, "quantity": "final_loss", "target_loss": math.nan}
    table = pd.DataFrame(
        [
            row | {"p_different": p, "verdict": verdict}
            for p, verdict in [(0.03, "different"), (0.9, "equivalent"), (0.9, "equivalent")]
        ]
    )
    family = family_verdicts(table).iloc[0]
    assert (family["verdict"], family["p_different"]) == ("not identified", pytest.approx(0.09))
    assert family_verdicts(table.head(1)).iloc[0]["verdict"] == "different"


def test_not_significant_is_not_equivalent(build):
    sweep = build()
    ends = {(1, 32, 1): (2.0, 2.1, 2.2), (1, 8, 4): (2.1, 2.0, 2.2)}
    for geometry, losses in ends.items():
        for seed, loss in enumerate(losses):
            sweep.run(geometry, seed=seed, loss=lambda k, e=loss: 0 * k + e, rounding=0.0)
    judged = judge_equivalence(paired_differences(cells_of(sweep)))
    row = judged[judged["quantity"] == "final_loss"].iloc[0]
    assert row["verdict"] == "not identified"
    assert row["low"] < 0 < row["high"]
    assert "neither within nor beyond 0.00500" in row["reason"]


def test_a_stated_margin_decides(swept):
    judged = judge_equivalence(paired_differences(cells_of(swept(measure__equivalence_margin=0.2))))
    assert judged["verdict"].tolist() == ["equivalent"] * 4
    assert judged["margin"].eq(0.2).all()


@pytest.mark.slow
def test_margins_that_differ_give_no_verdict(swept):
    sweep = swept()
    for seed in SEEDS:
        sweep.run((4, 8, 1), seed=seed, measure__equivalence_margin=0.5)
    cells = cells_of(sweep)
    assert len(cells.table) == 4, "a margin is no setting that tells cells apart"
    judged = judge_equivalence(paired_differences(cells))
    last = judged[judged["cell"] == 3]
    assert set(last["verdict"]) == {"not identified"}
    assert last["reason"].str.contains(r"several margins \(0.005, 0.5\)").all()
    assert not last["margin_stated"].any()


def test_runs_that_state_no_margin(swept):
    sweep = swept()
    runs = load(sweep.path).runs.drop(columns=list(MARGINS))
    judged = judge_equivalence(paired_differences(find_cells(runs)))
    assert judged["margin"].eq(0.005).all()
    assert not judged["margin_stated"].any()


def test_a_pair_of_which_one_diverged_is_infinitely_different(build):
    sweep = build()
    for seed in SEEDS:
        sweep.run((1, 32, 1), seed=seed)
        sweep.run((1, 8, 4), seed=seed, status="diverged" if seed == 1 else "completed")
        sweep.run((2, 8, 2), seed=seed, status="failed" if seed == 1 else "completed", reason="x")
    judged = judge_equivalence(paired_differences(cells_of(sweep))).set_index(["cell", "quantity"])
    one_diverged = judged.loc[(1, "final_eval_loss")]
    assert one_diverged["verdict"] == "not identified"
    assert one_diverged["reason"] == "1 of 3 pairs have no finite difference"
    # What failed says nothing of the training.
    assert judged.loc[(2, "final_eval_loss"), "verdict"] == "equivalent"
    assert judged.loc[(2, "final_eval_loss"), "n"] == 2


def test_pairs_that_both_diverged_are_counted_apart(build):
    sweep = build()
    for seed in SEEDS:
        for geometry in ((1, 32, 1), (1, 8, 4)):
            sweep.run(geometry, seed=seed, status="diverged" if seed == 0 else "completed")
    judged = judge_equivalence(paired_differences(cells_of(sweep)))
    assert judged["n"].tolist() == [2, 2]
    assert judged["n_without"].tolist() == [1, 1]


@pytest.mark.slow
def test_steps_to_target_are_compared_in_logarithms(swept):
    cells = cells_of(swept())
    runs = cells.runs[["sweep_dir", "run_id", "cell"]]
    reaches = runs.assign(target_loss=2.5, outcome="reached")
    reaches["steps_to_target"] = 100.0 * np.exp(0.001 * reaches["cell"]) + 0.001 * np.arange(9)
    judged = judge_equivalence(paired_differences(cells, reaches))
    steps = judged[judged["quantity"] == "log_steps_to_target"].sort_values("cell")
    assert steps["mean_difference"].tolist() == pytest.approx([0.001, 0.002], abs=1e-4)
    assert steps["margin"].tolist() == [0.02, 0.02]
    assert steps["verdict"].tolist() == ["equivalent"] * 2
    # One cut missed it: only the easier target that all of them reached counts.
    reaches.loc[reaches["cell"] == 1, ["outcome", "steps_to_target"]] = ["censored", math.nan]
    easier = reaches.assign(target_loss=2.8, outcome="reached", steps_to_target=50.0)
    judged = judge_equivalence(paired_differences(cells, pd.concat([reaches, easier])))
    steps = judged[judged["quantity"] == "log_steps_to_target"]
    assert steps["target_loss"].tolist() == [2.8, 2.8]
    assert steps["mean_difference"].tolist() == [0, 0]
