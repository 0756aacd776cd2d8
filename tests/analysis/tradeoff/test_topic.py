"""Curves over targets, and what a report says of a trade-off."""

import math

import numpy as np
import pandas as pd
import pytest
from ground_truth import noisy_log_steps, sweep_table
from scipy import stats

from batchscape.analysis.tradeoff.fit import fit_tradeoff
from batchscape.analysis.tradeoff.topic import tradeoff_section

BATCHES = np.array([8.0, 16, 32, 64, 128, 256, 512])
CRITICAL = {3.0: 20.0, 2.5: 50.0, 2.0: 120.0}


@pytest.fixture(scope="module")
def reaches():
    rng = np.random.default_rng(4)
    parts = [
        sweep_table(noisy_log_steps(rng, np.log(100 * (1 + c / BATCHES)), 1, 4)[0], BATCHES).assign(
            target_loss=target
        )
        for target, c in CRITICAL.items()
    ]
    return pd.concat(parts, ignore_index=True).assign(run_id=lambda t: t.index.map("r{}".format))


@pytest.fixture(scope="module")
def section(reaches):
    return tradeoff_section(
        reaches.assign(cell=0),
        noise_scales=pd.DataFrame(
            {
                "estimate": [90.0],
                "group": 0,
                "cell": 0,
                "global_batch_size": [8],
            }
        ),
        warnings=["The learning rate was not tuned."],
    )


def test_curve_has_the_fit_of_each_target(section, reaches):
    curve = section.tables[0].frame.set_index("target_loss")
    assert list(curve.index) == [3.0, 2.5, 2.0]
    for target, rows in reaches.groupby("target_loss"):
        fit = fit_tradeoff(rows)
        row = curve.loc[target]
        assert row["critical_batch_size"] == fit.critical_batch_size.value
        assert row["critical_batch_size_low"] < CRITICAL[target] < row["critical_batch_size_high"]
        assert row["runs"].split() == list(fit.runs["run_id"])


def test_section_answers_first_with_definition_and_interval(section, reaches):
    fit = fit_tradeoff(reaches[reaches["target_loss"] == 2.0])
    easier = fit_tradeoff(reaches[reaches["target_loss"] == 2.5])
    critical = section.headlines["critical_batch_size"]
    # The next target gives less than the interval holds: the range of both is shown.
    assert easier.critical_batch_size.value < fit.critical_batch_size.low
    assert (critical.low, critical.high) == (
        easier.critical_batch_size.value,
        fit.critical_batch_size.value,
    )
    assert (
        f"at a loss of 2 is {critical.low:.3g} to {critical.high:.3g} samples" in section.answer[0]
    )
    assert "mccandlish" in section.answer[0]
    assert "range over fair readings, in place of an interval" in section.answer[0]
    assert section.warnings[0] == "The learning rate was not tuned."
    ratio = 90 / fit.critical_batch_size.value
    assert f"is {ratio:.2f} times that" in section.answer[-1]


def test_the_picture_has_every_run_by_how_it_ended(reaches):
    rows = reaches[reaches["target_loss"].eq(2.0)].assign(outcome="reached", steps_low=50.0)
    ends = {"censored": 512, "pruned": 256, "diverged": 8}
    for outcome, batch in ends.items():
        at = rows["global_batch_size"].eq(batch) & rows["seed"].eq(0)
        rows.loc[at, ["outcome", "steps_to_target"]] = outcome, math.nan
    drawn = {marks.name: marks.table for marks in tradeoff_section(rows).pictures[0].marks}
    reached = rows[rows["outcome"].eq("reached")]
    assert sorted(drawn["runs"]["run_id"]) == sorted(reached["run_id"])
    short = drawn["not reached: more than this"]
    assert sorted(short["global_batch_size"]) == [256, 512]
    assert short["steps_to_target"].eq(50).all()
    assert drawn["diverged"]["global_batch_size"].tolist() == [8]
    assert drawn["diverged"]["steps_to_target"].tolist() == [reached["steps_to_target"].min()]


def test_unidentified_groups_are_told_apart(reaches):
    few = reaches[reaches["global_batch_size"] < 32].assign(group=1)
    both = pd.concat([reaches.assign(group=0), few])
    report = tradeoff_section(both, groups={0: "gpt2", 1: "digits"})
    assert report.answer[0].startswith("gpt2: The critical batch size")
    assert any("digits" in text and "not identified" in text for text in report.answer)
    assert set(report.headlines) >= {"critical_batch_size_group_0", "critical_batch_size_group_1"}
    assert not report.headlines["critical_batch_size_group_1"].is_identified


def test_bad_tables_become_warnings_not_tracebacks(reaches):
    report = tradeoff_section(pd.concat([reaches, reaches]))
    assert any("appears more than once" in text for text in report.warnings)
    assert tradeoff_section(reaches[reaches["global_batch_size"] == 8]) is None
    assert tradeoff_section(reaches.iloc[:0]) is None


def test_table_without_targets_or_intervals(reaches):
    rows = reaches[(reaches["target_loss"] == 2) & (reaches["seed"] == 0)]
    report = tradeoff_section(rows.drop(columns=["target_loss", "run_id"]))
    assert "1 seed: no interval" in report.answer[0]
    assert any("1 seed" in text for text in report.warnings)


@pytest.mark.slow
def test_a_form_that_does_not_fit_is_said_first(reaches):
    rows = reaches[reaches["target_loss"] == 2].copy()
    rows.loc[rows["global_batch_size"] == 64, "steps_to_target"] *= 2
    report = tradeoff_section(rows, form="two_term")
    fit = fit_tradeoff(rows, form="two_term")
    assert fit.lack_of_fit_p < 0.05
    assert "does not fit these runs (p = " in report.answer[0]
    assert "does not fit" in report.headlines["critical_batch_size"].note
    assert report.tables[0].frame["note"].str.contains("does not fit").all()
    assert fit_tradeoff(reaches[reaches["target_loss"] == 2]).critical_batch_size.note is None


@pytest.mark.slow
def test_a_choice_among_learning_rates_is_said(reaches):
    queries = []

    def tuning(group, target):
        queries.append((group, target))
        return "B = 8 is at the edge."

    report = tradeoff_section(reaches.assign(n_learning_rates=5), tuning=tuning)
    plain = tradeoff_section(reaches.assign(n_learning_rates=1))
    assert any("best of up to 5 learning rates" in text for text in report.answer)
    assert not any("learning rates" in text for text in plain.answer)
    assert queries == [(0, 2.0)]
    assert "B = 8 is at the edge." in report.warnings


def test_noise_scales_are_of_the_runs_of_the_fit_and_count_once_a_batch(reaches):
    """Cell 0: batch 8; cells 1 and 2: batch 16, of which 3 is at another rate."""
    place = {8.0: 0, 16.0: 1}
    rows = reaches.assign(cell=reaches["global_batch_size"].map(place).fillna(9).astype(int))
    rows.loc[(rows["global_batch_size"] == 16) & (rows["seed"] == 0), "cell"] = 2
    scales = pd.DataFrame(
        {
            "estimate": [10.0, 30.0, 120.0, 1e6],
            "group": 0,
            "cell": [0, 1, 2, 3],
            "global_batch_size": [8, 16, 16, 16],
        }
    )
    report = tradeoff_section(rows, noise_scales=scales)
    # The square root of 10 times the square root of 30 times 120.
    assert "24.5 samples (geometric mean over 2 of 7 batch sizes)" in report.answer[-1]


def test_the_first_screen_says_what_samples_buy(reaches):
    """The ratio over seeds by plain pandas and scipy, at the target that is spoken of."""
    rows = reaches[reaches["target_loss"] == 2.0]
    buys, critical = tradeoff_section(rows).first_screen
    steps = rows.pivot(index="seed", columns="global_batch_size", values="steps_to_target")
    logs = np.log(steps[8] / steps[512])
    low, high = stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs))
    fewer = [f"{np.exp(value):.3g}" for value in (logs.mean(), low, high)]
    more = [f"{64 / np.exp(value):.3g}" for value in (logs.mean(), high, low)]
    assert f"{fewer[0]} [{fewer[1]}, {fewer[2]}] times fewer optimizer steps and " in buys
    assert f"{more[0]} [{more[1]}, {more[2]}] times the samples (n = {len(logs)} seeds" in buys
    assert fit_tradeoff(rows).critical_batch_size.text() in critical


def test_the_first_screen_names_the_batch_sizes_left_out(reaches):
    rows = reaches[reaches["target_loss"] == 2.0].copy()
    rows.loc[(rows["global_batch_size"] == 512) & (rows["seed"] == 0), "steps_to_target"] = math.nan
    buys, critical = tradeoff_section(rows).first_screen
    assert buys.startswith("From a global batch of 8 to 256 samples")
    assert buys.endswith(" them). (B = 512 left out: not all runs reached the target.)")
    assert "left out" not in critical


def test_batch_sizes_without_a_common_seed_give_no_ratio(reaches):
    rows = reaches[reaches["target_loss"] == 2.0]
    short = tradeoff_section(rows.assign(seed=range(len(rows)))).first_screen
    assert len(short) == 1
    assert short[0].startswith("The critical batch size")


def demo_like(first_at_8=192.0, seeds=5):
    """Five batch sizes at two targets; at 0.23 all but the largest meet it early."""
    sizes, rng = np.array([8.0, 16, 32, 64, 128]), np.random.default_rng(1)
    good = {0.23: [856.0, 359, 171, 84, 57], 0.42: [166.0, 84, 47, 36, 34]}
    first = {0.23: [first_at_8, 217, 95, 73, 56], 0.42: [165.0, 83, 47, 36, 34]}
    rows = [
        {
            "global_batch_size": size,
            "seed": seed,
            "target_loss": target,
            "steps_to_target": good[target][i] * scatter,
            "first_steps_to_target": first[target][i] * scatter,
            "learning_rate": 0.02 * 2**i,
            "n_learning_rates": 5,
            "crossing": "sustained",
            "outcome": "reached",
        }
        for target in good
        for seed in range(seeds)
        for i, size in enumerate(sizes)
        for scatter in [np.exp(0.03 * rng.standard_normal())]
    ]
    return pd.DataFrame(rows)


def test_a_target_that_runs_met_early_is_never_spoken_of_first():
    report = tradeoff_section(demo_like())
    table = report.tables[0].frame.set_index("target_loss")
    assert table.loc[0.23, ["runs_met_early", "runs_reached"]].tolist() == [20, 25]
    assert table["is_spoken_of"].tolist() == [True, False]
    assert "a loss of 0.42 takes " in report.first_screen[0]
    assert not any("0.23" in text for text in report.first_screen)


def test_without_a_settled_target_nothing_is_identified():
    rows = demo_like()
    report = tradeoff_section(rows[rows["target_loss"].eq(0.23)])
    assert "is not identified: no target is settled." in report.first_screen[0]
    assert not any(estimate.is_identified for estimate in report.headlines.values())
    assert "20 of 25 runs first met it" in report.answer[0]


def test_the_ratio_of_first_crossings_lies_in_the_interval():
    """Two of 25 runs met it at a fifth of the steps: a target may do so, a ratio says it."""
    rows = demo_like()
    rows = rows[rows["target_loss"].eq(0.42)].copy()
    early = rows["global_batch_size"].eq(8) & rows["seed"].lt(2)
    rows.loc[early, "first_steps_to_target"] = rows.loc[early, "steps_to_target"] / 20
    steps = rows.pivot(index="seed", columns="global_batch_size", values="steps_to_target")
    first = rows.pivot(index="seed", columns="global_batch_size", values="first_steps_to_target")
    values = [float(np.exp(np.log(t[8] / t[128]).mean())) for t in (steps, first)]
    report = tradeoff_section(rows)
    ratio = report.headlines["steps_ratio"]
    assert ratio.value == pytest.approx(values[0])
    assert ratio.low < values[1] < values[0] < ratio.high
    assert "first crossings" in ratio.method
