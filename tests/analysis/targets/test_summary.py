"""Reaches summed up, and what a report says of them."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from batchscape.analysis.cells import find_cells
from batchscape.analysis.learning_rate.choice import at_best_learning_rate
from batchscape.analysis.numbers import TIMES
from batchscape.analysis.report import topics
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.analysis.targets.summary import reaches_table
from batchscape.analysis.targets.tidy import distinct_trajectories
from batchscape.analysis.targets.topic import reaches_shown, targets_section
from batchscape.errors import AnalysisError
from batchscape.record.tables import load


def reaches(**more: object) -> pd.DataFrame:
    rows = pd.DataFrame(
        {
            "global_batch_size": [8] * 3 + [16] * 3 + [32] * 3,
            "seed": [0, 1, 2] * 3,
            "target_loss": 2.5,
            "steps_to_target": [100.0, 120.0, 110.0, 60.0, 70.0, np.nan, 50.0, np.nan, np.nan],
            "outcome": ["reached"] * 5 + ["censored", "reached", "diverged", "pruned"],
            "steps_low": [90.0, 110.0, 105.0, 50.0, 65.0, 80.0, 40.0, np.inf, 30.0],
            "run_id": list("abcdefghi"),
        }
    )
    return rows.assign(**more)


def test_counts_medians_and_runs_of_each_batch():
    table = reaches_table(reaches()).set_index("global_batch_size")
    counts = ["n", "n_reached", "n_censored", "n_pruned", "n_diverged"]
    assert table[counts].values.tolist() == [[3, 3, 0, 0, 0], [3, 2, 1, 0, 0], [3, 1, 0, 1, 1]]
    mean = (100 * 120 * 110) ** (1 / 3)
    assert table["steps_to_target"].tolist()[:2] == pytest.approx([mean, 70.0])
    half = stats.t.ppf(0.975, 2) * np.log([100.0, 120.0, 110.0]).std(ddof=1) / math.sqrt(3)
    assert table["steps_to_target_high"][8] == pytest.approx(mean * math.exp(half))
    assert table["statistic"].tolist() == ["geometric mean", "median", "median"]
    # 30 or more, 50, infinity: the median is 50 or more, up to infinity.
    assert math.isnan(table["steps_to_target"][32])
    assert table["samples_to_target"][8] == pytest.approx(8 * mean)
    assert table["run_ids"].tolist() == ["a b c", "d e f", "g h i"]


def test_a_median_over_many_runs_has_an_interval_and_may_be_infinite():
    rows = pd.DataFrame(
        {
            "global_batch_size": 8,
            "seed": range(9),
            "steps_to_target": [10.0, 20, 30, 40, np.inf, np.inf, np.inf, np.inf, np.inf],
        }
    )
    row = reaches_table(rows).iloc[0]
    assert (row["steps_to_target"], row["steps_to_target_low"]) == (math.inf, 20.0)
    assert "∞ [20.00, ∞]" in reaches_shown(reaches_table(rows)).texts.rows[0]


def test_runs_of_one_trajectory_count_once_and_a_completed_one_counts():
    rows = reaches(trajectory_id=list("ppqrstuvw"), status="completed")
    rows.loc[0, "status"] = "oom"
    kept = distinct_trajectories(rows)
    assert kept["run_id"].tolist() == list("bcdefghi")
    assert reaches_table(rows)["n"].tolist() == [2, 3, 3]


def test_a_table_shows_the_figure_by_which_its_learning_rates_were_chosen():
    """The mean chooses the steady rate; the other one has the lower median."""
    steps = {0.1: [150.0, 170.0, 160.0], 0.2: [120.0, 900.0, 100.0]}
    rows = pd.DataFrame(
        {"global_batch_size": 8, "seed": seed, "learning_rate": rate, "steps_to_target": taken}
        for rate, cell in steps.items()
        for seed, taken in enumerate(cell)
    )
    every = reaches_table(rows).set_index("learning_rate")["steps_to_target"]
    (chosen,) = reaches_table(at_best_learning_rate(rows)).to_dict("records")
    assert chosen["learning_rate"] == every.idxmin() == 0.1
    assert chosen["steps_to_target"] == pytest.approx((150 * 170 * 160) ** (1 / 3))


def test_a_time_is_of_one_cut():
    """Three runs of 1 x 32 x 1 and two of 1 x 8 x 4 share their steps, not their times."""
    rows = pd.DataFrame(
        {
            "global_batch_size": 32,
            "seed": range(5),
            "steps_to_target": [100.0, 110, 90, 105, 95],
            "time_to_target_s": [0.2, 0.22, 0.18, 0.42, 0.38],
            "cell": [0, 0, 0, 1, 1],
        }
    )
    mixed = reaches_table(rows).iloc[0]
    assert mixed["steps_to_target"] == pytest.approx(stats.gmean(rows["steps_to_target"]))
    assert math.isnan(mixed["time_to_target_s"])
    one = reaches_table(rows[rows["cell"].eq(0)])
    assert one["time_to_target_s"].iloc[0] == pytest.approx((0.2 * 0.22 * 0.18) ** (1 / 3))
    assert any(
        "Times depend on the cut: a row with several cuts has none" in note
        for note in reaches_shown(one).notes
    )


def test_a_median_time_knows_how_long_runs_trained_without_the_target():
    curves = pd.concat(
        pd.DataFrame(
            {
                "run": seed,
                "seed": seed,
                "global_batch_size": 8,
                "optimizer_step": [0, 100, 200, 400],
                "train_time_s": np.array([0.0, 1.0, 2.0, 4.0]) * pace,
                "tokens": [0, 800, 1600, 3200],
                "loss": [3.0, 2.0, 1.0 if seed < 3 else 2.0, 1.0 if seed < 3 else 2.0],
            }
        )
        for seed, pace in enumerate([1.0, 1.1, 1.2, 1.0, 1.0])
    )
    row = reaches_table(steps_to_target(curves, [1.5])).iloc[0]
    assert (row["n_reached"], row["n"], row["statistic"]) == (3, 5, "median")
    # Two of five trained on for 4 s: the median is the last of the three that reached.
    taken = steps_to_target(curves, [1.5])["time_to_target_s"]
    assert row["time_to_target_s"] == pytest.approx(taken.max())
    assert row["tokens_to_target"] == pytest.approx(8 * row["steps_to_target"])


def test_learning_rates_are_never_pooled():
    table = reaches_table(reaches(learning_rate=[0.1, 0.1, 0.2] * 3))
    assert table["n"].tolist() == [2, 1] * 3


def test_the_grid_shows_who_did_not_reach():
    grid = reaches_shown(reaches_table(reaches())).texts
    assert grid.headers[:3] == ["target loss", "global batch", "reached"]
    assert [row[2] for row in grid.rows] == ["3 of 3", "2 of 3", "1 of 3"]
    assert list(grid.footnotes.values()) == [
        "median; 1 censored, of the runs in this row",
        "median; 1 pruned, 1 diverged, of the runs in this row",
    ]
    assert grid.marks == [[], ["a"], ["b"]]


def test_the_section_answers_first_and_warns():
    rows = reaches(
        first_steps_to_target=[50.0, *[120.0] * 8],
        confirmed_by=[0] + [3] * 8,
        averaged=True,
        interpolation_error=0.4,
    )
    section = targets_section(rows, notes=["as chosen"], schedules=["cosine", "constant"])
    assert "of 16 (70.0 steps), the fewest samples by one of 8 (878 samples)" in section.answer[0]
    assert "6 were reached; 1 censored, 1 pruned, 1 diverged" in section.answer[1]
    warnings = "\n".join(section.warnings)
    for text in ("coarse", "more than 10 % earlier", "last measurement", "averaged weights",
                 "decays (cosine)"):  # fmt: skip
        assert text in warnings
    assert "decays" not in "\n".join(targets_section(rows, schedules=["constant"]).warnings)  # type: ignore[union-attr]


def test_one_global_batch_is_compared_with_no_other():
    rows = reaches()
    alone = targets_section(rows[rows["global_batch_size"] == 8])
    assert alone.answer[0] == (
        "To reach a held-out loss of 2.5, a global batch of 8 takes 110 optimizer steps and "
        "878 samples: geometric means over runs."
    )
    others = rows["global_batch_size"] != 8
    only = targets_section(
        rows.assign(
            steps_to_target=rows["steps_to_target"].mask(others),
            outcome=rows["outcome"].mask(others, "censored"),
            steps_low=90.0,
        )
    )
    assert "only a global batch of 8 gets there with half of its runs; it takes" in only.answer[0]


def test_nothing_to_say_and_nothing_to_sum_up():
    assert targets_section(reaches().iloc[:0]) is None
    with pytest.raises(AnalysisError, match="needs the columns steps_to_target"):
        reaches_table(pd.DataFrame({"global_batch_size": [8]}))


def test_a_cut_of_a_program_that_diverges_has_a_row_of_its_own(build):
    sweep = build()
    for seed in range(3):
        sweep.run((1, 8, 4), seed=seed)
        sweep.run((1, 32, 1), seed=seed, status="diverged")
    tables = load(sweep.path)
    runs = tables.runs.assign(**{"engine.name": "command"})
    assert runs.groupby("seed")["trajectory_id"].nunique().eq(1).all()
    cells = find_cells(runs)
    material = topics.Material(cells, tables, [5.0])
    section = topics.TOPICS["Targets"](material)
    table = section.tables[0].frame.set_index("program_cut")
    counts = table[["n", "n_reached", "n_diverged"]]
    assert counts.loc[TIMES.join("184")].tolist() == [3, 3, 0]
    assert counts.loc[TIMES.join(["1", "32", "1"])].tolist() == [3, 0, 3]


def test_a_repeat_of_a_program_that_diverged_is_not_hidden():
    rows = reaches(trajectory_id=list("pqrstuvvv"), status="completed", program_cut="1 x 8 x 1")
    rows.loc[7, "status"] = "diverged"
    assert distinct_trajectories(rows)["run_id"].tolist() == list("abcdefh")
    assert distinct_trajectories(rows.assign(program_cut=None))["run_id"].tolist() == list(
        "abcdefg"
    )
