"""Time to a target: closed forms, censoring, the front, and coverage of the interval."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from batchscape.analysis.cost.step_time import fit_step_time
from batchscape.analysis.decisions.to_target import (
    pareto_front,
    step_times,
    steps_by_batch,
    time_to_target,
)


def reaches(steps, batch=32, **columns):
    rows = {"global_batch_size": batch, "seed": range(len(steps)), "steps_to_target": steps}
    return pd.DataFrame(rows | columns)


def times(cells, repeats=(1.0, 1.1, 0.9)):
    rows = [
        {
            "data_parallel_size": d,
            "micro_batch_size": m,
            "gradient_accumulation_steps": a,
            "step_time_s": seconds * factor,
        }
        for (d, m, a), seconds in cells.items()
        for factor in repeats
    ]
    return pd.DataFrame(rows)


def test_time_is_steps_times_step_time_and_variances_of_logarithms_add():
    steps = np.array([100.0, 120.0, 90.0, 110.0])
    table = times({(2, 8, 2): 0.5})
    row = time_to_target(steps_by_batch(reaches(steps)), step_times(table, [(2, 8, 2)])).iloc[0]
    seconds = np.log(table["step_time_s"])
    centre = np.log(steps).mean() + seconds.mean()
    parts = np.array([np.log(steps).var(ddof=1) / 4, seconds.var(ddof=1) / 3])
    degrees = parts.sum() ** 2 / (parts**2 / [3, 2]).sum()
    half = stats.t.ppf(0.975, degrees) * np.sqrt(parts.sum())
    assert row["time_s"] == pytest.approx(np.exp(centre))
    assert row["time_low_s"] == pytest.approx(np.exp(centre - half))
    assert row["time_high_s"] == pytest.approx(np.exp(centre + half))
    assert row["device_hours"] == pytest.approx(2 * np.exp(centre) / 3600)


def test_a_run_that_did_not_reach_opens_the_interval_and_stays_in_the_count():
    table = times({(1, 32, 1): 2.0}, repeats=(1.0, 1.0))
    some = reaches([100.0, 140.0, math.nan], steps_low=[90.0, 130.0, 200.0])
    row = time_to_target(steps_by_batch(some), step_times(table, [(1, 32, 1)])).iloc[0]
    assert row["time_s"] == pytest.approx(280)
    assert (row["time_low_s"], row["time_high_s"]) == (200, math.inf)
    assert (row["n_reached"], row["n_seeds"]) == (2, 3)
    most = reaches([100.0, math.inf, math.nan], outcome=["reached", "diverged", "censored"])
    row = time_to_target(steps_by_batch(most), step_times(table, [(1, 32, 1)])).iloc[0]
    assert row["time_s"] == math.inf
    assert row["outcomes"] == "1 reached, 1 diverged, 1 censored"


def test_runs_of_one_trajectory_count_once():
    twice = reaches([100.0, 100.0, 120.0], trajectory_id=["a", "a", "b"], run_id=["1", "2", "3"])
    steps = steps_by_batch(twice).loc[32]
    assert steps["n_seeds"] == 2
    assert steps["steps"] == pytest.approx(math.sqrt(12000))


def test_repeats_of_a_program_count_once_by_all_of_them():
    cut = {"data_parallel_size": 1, "micro_batch_size": 32, "gradient_accumulation_steps": 1}
    rows = reaches(
        [100.0, 144.0, 120.0, 90.0, math.inf],
        trajectory_id=["a", "a", "b", "c", "c"],
        run_id=list("12345"),
        outcome=["reached"] * 4 + ["diverged"],
        **cut,
    )
    steps = steps_by_batch(rows[:3], tuple(cut)).iloc[0]
    assert (steps["n_seeds"], steps["n_reached"]) == (2, 2)
    assert steps["steps_log_of"] == pytest.approx({"a": math.log(120), "b": math.log(120)})
    steps = steps_by_batch(rows, tuple(cut)).iloc[0]
    assert (steps["n_seeds"], steps["n_reached"]) == (3, 2)
    assert steps["steps_log_of"]["c"] == math.inf
    assert steps["outcomes"] == "2 reached, 1 diverged"
    assert steps["run_ids"] == "1;2;3;4;5"
    # Runs of one trajectory that train alike: the one that ended early tells nothing of its own.
    assert steps_by_batch(rows).loc[32, "n_reached"] == 3


def test_one_seed_or_one_time_has_a_value_without_interval():
    table = times({(1, 32, 1): 2.0}, repeats=(1.0,))
    row = time_to_target(steps_by_batch(reaches([10.0])), step_times(table, [(1, 32, 1)])).iloc[0]
    assert row["time_s"] == pytest.approx(20)
    assert math.isnan(row["time_low_s"])


def test_what_was_not_measured_is_predicted_and_flagged():
    table = times({(1, m, 1): 0.1 + 0.01 * m for m in (4, 8, 16)})
    model = fit_step_time(table)
    rows = step_times(table, [(1, 8, 1), (1, 12, 1), (1, 32, 1), (2, 8, 1)], model)
    assert rows["source"].to_list() == ["measured", "predicted", "predicted", "unknown"]
    assert rows["beyond"].to_list() == ["", "", "micro-batch 32 (measured: 4 to 16)", ""]
    assert rows["step_time_s"].iloc[1] == pytest.approx(0.22)
    assert step_times(table, [(1, 12, 1)])["source"].to_list() == ["unknown"]


def test_a_predicted_time_that_is_open_by_more_than_ten_times_is_unknown():
    table = times({(1, 1, 1): 1.0, (1, 2, 1): 2.5, (1, 4, 1): 2.6}, repeats=(1.0,))
    model = fit_step_time(table)
    rows = step_times(table, [(1, 4, 1), (1, 16, 1)], model)
    assert rows["source"].to_list() == ["measured", "unknown"]
    assert math.isnan(rows["step_time_s"].iloc[1])
    steps = steps_by_batch(reaches([10.0, 10.0], [4, 16]))
    by_batch = time_to_target(steps, rows).set_index("global_batch_size")
    assert by_batch["time_s"].isna().to_list() == [False, True]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1.0, 2.0, 3.0, math.inf, math.nan]),
            st.sampled_from([1.0, 2.0, 3.0, 4.0, math.nan]),
        ),
        max_size=12,
    )
)
def test_the_front_is_what_no_other_beats(points):
    table = pd.DataFrame(points, columns=["time", "cost"], dtype=float)

    def beaten(one):
        return any(
            other[0] <= one[0] and other[1] <= one[1] and other != one
            for other in points
            if math.isfinite(sum(other))
        )

    expected = [math.isfinite(sum(point)) and not beaten(point) for point in points]
    assert pareto_front(table["time"], table["cost"]).tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "noise"), [(3, (0.1, 0.03)), (3, (0.03, 0.1)), (3, (0.1, 0.1)), (10, (0.1, 0.1))]
)
def test_the_interval_covers_the_true_time(n, noise):
    """In 400 simulations: each is a global batch of its own, and none knows of another."""
    rng = np.random.default_rng(11)
    reached, measured = [], []
    cuts = [(2, 8, number) for number in range(1, 401)]
    for cut in cuts:
        steps = 100 * np.exp(noise[0] * rng.standard_normal(n))
        reached.append(reaches(steps, batch=math.prod(cut)))
        measured.append(times({cut: 0.5}, repeats=np.exp(noise[1] * rng.standard_normal(n))))
    steps, seconds = (pd.concat(rows, ignore_index=True) for rows in (reached, measured))
    rows = time_to_target(steps_by_batch(steps), step_times(seconds, cuts))
    alone = time_to_target(steps_by_batch(reached[7]), step_times(measured[7], [cuts[7]]))
    pd.testing.assert_frame_equal(
        rows.iloc[[7]].filter(regex="time_").reset_index(drop=True), alone.filter(regex="time_")
    )
    assert len(rows) == 400
    hits = (rows["time_low_s"] <= 50) & (rows["time_high_s"] >= 50)
    assert 0.90 <= hits.mean() <= 0.99
