"""Growth of the difference between two trainings, against curves whose growth is known."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from batchscape.analysis.equivalence.divergence import growth_of_differences
from batchscape.errors import AnalysisError


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


def test_what_is_equal_to_the_last_bit_grows_not():
    rows = pairs((0.0, 0.0)).assign(difference=0.0)
    table = growth_of_differences(rows, 1e-3).loc[1]
    assert (table["early_rms"], table["late_rms"]) == (0.0, 0.0)
    assert math.isnan(table["growth_rate"])


def test_empty_and_bad_tables():
    assert growth_of_differences(pairs((0.0,)).iloc[:0], 1.0).empty
    with pytest.raises(AnalysisError, match="lack columns: difference"):
        growth_of_differences(pairs((0.0,)).drop(columns="difference"), 1.0)
    with pytest.raises(AnalysisError, match="above 0"):
        growth_of_differences(pairs((0.0,)), 0.0)
