"""Growth of the difference between two trainings, against curves whose growth is known."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from batchscape.analysis.equivalence.divergence import growth_of_differences


def pairs(rates, cell=1, start=1e-7, steps=200):
    step = np.arange(1, steps + 1)
    return pd.concat(
        pd.DataFrame(
            {
                "cell": cell,
                "trajectory_id": f"seed {seed}",
                "optimizer_step": step,
                # Signs change and some differences are exactly zero.
                "difference": np.where(step % 7, (-1.0) ** step * start * np.exp(rate * step), 0),
            }
        )
        for seed, rate in enumerate(rates)
    )


def test_growth_rates_are_found_by_seed():
    rates = (0.04, 0.05, 0.06)
    table = growth_of_differences(pd.concat([pairs(rates), pairs((0.0,), cell=2)]), 1e-4)
    first = table.loc[1]
    assert first["growth_rate"] == pytest.approx(0.05)
    interval = stats.ttest_1samp(rates, 0).confidence_interval(0.95)
    assert (first["growth_low"], first["growth_high"]) == pytest.approx(tuple(interval))
    assert table.loc[2, "growth_rate"] == pytest.approx(0, abs=1e-12)
    assert math.isnan(table.loc[2, "growth_low"])
    assert table["n_trajectories"].tolist() == [3, 1]


def test_first_step_beyond_in_any_seed():
    table = growth_of_differences(pairs((0.04, 0.05, 0.02)), 1e-4)
    # e^(0.05 k) > 1000 from k = 138.2 on; e^(0.02 k) never within 200 steps.
    assert table.loc[1, "first_step_beyond"] == 139
    assert table.loc[1, "n_beyond"] == 2
    never = growth_of_differences(pairs((0.0,)), 1e-4)
    assert math.isnan(never.loc[1, "first_step_beyond"])
    assert never.loc[1, "n_beyond"] == 0


def test_early_and_late_are_the_tenths_at_either_end():
    rows = pairs((0.01, 0.02))
    table = growth_of_differences(rows, 1.0).loc[1]
    squares = rows["difference"] ** 2
    assert table["early_rms"] == pytest.approx(squares[rows["optimizer_step"] <= 20].mean() ** 0.5)
    assert table["late_rms"] == pytest.approx(squares[rows["optimizer_step"] > 180].mean() ** 0.5)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3),  # cell
            st.sampled_from(["a", "b", "c", None]),  # trajectory
            st.integers(1, 30),
            st.sampled_from([0.0, 1e-9, -1e-3, 0.5, -2.0, math.inf, math.nan]),
        ),
        unique_by=lambda row: row[:3],
        min_size=1,
        max_size=60,
    )
)
def test_figures_are_those_of_one_cell_and_trajectory_after_the_other(rows):
    names = ["cell", "trajectory_id", "optimizer_step", "difference"]
    table = growth_of_differences(pd.DataFrame(rows, columns=names), 0.1)
    known = [row for row in rows if not math.isnan(row[3])]
    assert table.index.tolist() == sorted({cell for cell, *_ in known})
    for cell, found in table.iterrows():
        own = [row[1:] for row in known if row[0] == cell]
        last = max(step for _, step, _ in own)
        for name, kept in (
            ("early_rms", [d for _, step, d in own if step <= 0.1 * last]),
            ("late_rms", [d for _, step, d in own if step > 0.9 * last]),
        ):
            wanted = math.sqrt(sum(d**2 for d in kept) / len(kept)) if kept else math.nan
            assert found[name] == pytest.approx(wanted, rel=1e-12, nan_ok=True)
        curves = {name: [] for name, *_ in own}
        for name, step, d in own:
            curves[name].append((step, abs(d)))
        passed = [step for curve in curves.values() for step, d in curve if d > 0.1]
        assert found["first_step_beyond"] == pytest.approx(
            min(passed, default=math.nan), nan_ok=True
        )
        assert found["n_beyond"] == sum(any(d > 0.1 for _, d in c) for c in curves.values())
        assert found["n_trajectories"] == len(curves)
        grown = [[(s, d) for s, d in curve if 0 < d < math.inf] for curve in curves.values()]
        slopes = [
            stats.linregress([step for step, _ in curve], [math.log(d) for _, d in curve]).slope
            for curve in grown
            if len(curve) > 1
        ]
        wanted = np.mean(slopes) if slopes else math.nan
        assert found["growth_rate"] == pytest.approx(wanted, abs=1e-9, nan_ok=True)


def test_a_missing_trajectory_is_one_of_its_own():
    rows = pd.concat([pairs((0.04,)), pairs((0.05, 0.06), cell=2)])
    rows.loc[rows["cell"].eq(2) & rows["trajectory_id"].eq("seed 0"), "trajectory_id"] = None
    table = growth_of_differences(rows, 1e-4)
    assert table["n_trajectories"].tolist() == [1, 2]
    assert table["growth_rate"].tolist() == pytest.approx([0.04, 0.055])


def test_what_is_equal_to_the_last_bit_grows_not():
    rows = pairs((0.0, 0.0)).assign(difference=0.0)
    table = growth_of_differences(rows, 1e-3).loc[1]
    assert (table["early_rms"], table["late_rms"]) == (0.0, 0.0)
    assert math.isnan(table["growth_rate"])


def test_nothing_paired_grows_not():
    assert growth_of_differences(pairs((0.0,)).iloc[:0], 1.0).empty
