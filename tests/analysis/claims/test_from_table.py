"""Claims judged by a table: the verdicts of run folders, and what a table lacks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis import judge_claims, judge_table
from batchscape.analysis.claims.claim import Verdict
from batchscape.analysis.claims.from_table import claims_from_table
from batchscape.errors import AnalysisError

CUTS = [(1, 8, 1), (1, 8, 4), (1, 32, 1), (2, 8, 2), (1, 4, 8)]


def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = [
        {
            "data_parallel_size": devices,
            "micro_batch_size": micro,
            "gradient_accumulation_steps": steps,
            "batch": devices * micro * steps,
            "seed": seed,
            "step_time_s": steps * (0.01 + 0.002 * micro) * (1 + 0.01 * rng.normal()),
            "peak_allocated_gib": 0.5 + 0.1 * micro * (1 + 0.001 * rng.normal()),
            "loss": 2 + 0.01 * seed + 1e-5 * rng.normal(),
        }
        for devices, micro, steps in CUTS
        for seed in range(4)
    ]
    return pd.DataFrame(rows)


def by_id(verdicts: list[Verdict]) -> dict[str, Verdict]:
    assert len({verdict.claim.id for verdict in verdicts}) == len(verdicts) == 16
    return {verdict.claim.id: verdict for verdict in verdicts}


def test_a_table_is_judged_as_run_folders_are(world) -> None:
    """The same figures as runs of a sweep: the same verdicts and effects."""
    made = world()
    for row in table().to_dict("records"):
        names = ("data_parallel_size", "micro_batch_size", "gradient_accumulation_steps")
        cut = tuple(int(row[name]) for name in names)
        figures = {name: row[name] for name in ("step_time_s", "peak_allocated_gib")}
        made.run(cut, int(row["seed"]), final_eval_loss=row["loss"], **figures)
    found, expected = by_id(judge_table(table())), by_id(judge_claims(made.evidence()))
    settled = {name for name, verdict in found.items() if verdict.verdict != "not identified"}
    assert settled == {name for name, v in expected.items() if v.verdict != "not identified"}
    assert {"memory-follows-micro", "decompositions-are-equivalent"} <= settled
    for name in settled:
        assert found[name].verdict == expected[name].verdict
        for end in ("value", "low", "high", "n"):
            assert getattr(found[name].effect, end) == pytest.approx(
                getattr(expected[name].effect, end)
            )


def test_what_a_table_lacks_is_said() -> None:
    found = by_id(judge_table(table().drop(columns="peak_allocated_gib")))
    assert found["memory-follows-micro"].verdict == "not identified"
    assert "The table lacks peak_allocated_gib." in found["memory-follows-micro"].explanation
    assert found["micro-before-accumulation"].verdict == "supported"
    # Without a geometry none is made up, though memory and times are there.
    bare = table().iloc[:12].drop(columns=["micro_batch_size", "loss"])
    bare = bare.assign(timing_repeat=np.arange(12))
    found = by_id(judge_table(bare))
    assert {verdict.verdict for verdict in found.values()} == {"not identified"}
    lacks = found["micro-before-accumulation"].explanation
    assert "lacks data_parallel_size, micro_batch_size, gradient_accumulation_steps" in lacks
    assert "rows of single steps" in found["large-batch-less-variance"].explanation


def test_learning_rates_of_final_losses_and_steps_settle_their_claims() -> None:
    rng = np.random.default_rng(1)
    rows = [
        {"batch": batch, "lr": rate, "seed": seed,
         "loss": 2 + np.log(rate / (0.001 * batch**0.5)) ** 2 + 0.003 * rng.normal()}
        for batch in (16, 32, 64, 128, 256)
        for rate in 0.001 * 2.0 ** np.arange(-1, 7)
        for seed in range(5)
    ]  # fmt: skip
    found = by_id(judge_table(pd.DataFrame(rows)))["learning-rate-grows-with-batch"]
    assert found.verdict == "supported"
    assert found.effect.value == pytest.approx(0.5, abs=0.05)
    steps = [
        {"batch": batch, "seed": seed, "steps": 1000 * (1 + seed / 50) / batch**0.5,
         "time_to_target_s": 10.0 * batch**0.5 * (1 + seed / 40)}
        for batch in (16, 64, 256) for seed in range(4)
    ]  # fmt: skip
    bare = by_id(judge_table(pd.DataFrame(steps)))["fewer-updates-slower-convergence"]
    assert "The table lacks target_loss" in bare.explanation
    named = pd.DataFrame(steps).assign(target_loss=2.5)
    slower = by_id(judge_table(named))["fewer-updates-slower-convergence"]
    assert slower.verdict == "supported"
    assert slower.effect.value == pytest.approx(4.0)


def test_a_geometry_that_contradicts_its_batch_is_refused() -> None:
    with pytest.raises(AnalysisError, match=r"has 1 x 8 x 1 = 8 and says 16"):
        judge_table(table().assign(batch=16))


def trajectories(given: pd.DataFrame) -> int:
    return claims_from_table(given).evidence.cells.runs["trajectory_id"].nunique()


def test_cuts_share_a_trajectory_and_nothing_else_does() -> None:
    """Four cuts have a global batch of 32, each with four seeds: these are four trainings."""
    cut = table().query("batch == 32")
    assert (len(cut), trajectories(cut)) == (16, 4)
    named = cut.assign(run=np.arange(16))
    assert trajectories(named) == 4
    assert trajectories(named.drop(columns="seed")) == 16
    assert trajectories(named.drop(columns="micro_batch_size")) == 16
    assert trajectories(named.assign(warmup=np.arange(16) // 8)) == 8
    assert trajectories(named.assign(warmup=np.arange(16))) == 16
    # The same cut twice under one seed is two trainings, and so is what goes with it.
    assert trajectories(named.assign(seed=0)) == 16
    along = pd.concat([named.assign(step=step, grad_norm=step * named["run"]) for step in (1, 2)])
    assert trajectories(along) == 4


def test_a_seed_given_twice_is_refused() -> None:
    twice = pd.DataFrame({"batch": [8, 8, 16], "seed": [0, 0, 0], "steps": [90, 100, 60]})
    for given in (twice, twice.assign(run=["a", "a", "b"]), twice.drop(columns="steps")):
        with pytest.raises(AnalysisError, match="batch_size=8, seed=0 is there more than once"):
            judge_table(given)
    with pytest.raises(AnalysisError, match="run a has several of global_batch_size"):
        judge_table(twice.assign(run="a").drop(columns="steps"))


@pytest.mark.slow
def test_a_figure_that_varies_along_a_run_is_withheld() -> None:
    """A table of curves: its first row is a warm-up, its last says how the run ended."""
    once = table()
    status = np.where(once["seed"].eq(0) & once["batch"].eq(8), "failed", "finished")
    parts = [
        once.assign(step=step, step_time_s=once["step_time_s"] * slow,
                    status="running" if step < 2 else status)
        for step, slow in ((2, 1), (1, 50))
    ]  # fmt: skip
    curves = pd.concat(parts)
    found = by_id(judge_table(curves))
    assert found["micro-before-accumulation"].verdict == "not identified"
    assert "step_time_s (it varies along a run)" in found["micro-before-accumulation"].explanation
    assert found["memory-follows-micro"].verdict == "supported"
    runs = claims_from_table(curves).evidence.cells.runs
    assert runs["status"].value_counts().to_dict() == {"completed": 19, "failed": 1}
    # Where no run ended there are no final losses to refuse the table for.
    open_ = by_id(judge_table(curves.assign(status="running")))
    assert open_["decompositions-are-equivalent"].verdict == "not identified"
