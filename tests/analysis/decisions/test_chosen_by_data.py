"""Intervals of geometries that the data chose: coverage among cuts that all take one time.

    python tests/analysis/decisions/test_chosen_by_data.py

prints the table of `analysis/decisions/candidates.py`.
"""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.decisions.candidates import compare_with
from batchscape.analysis.decisions.multiplicity import pair_quantile
from batchscape.analysis.decisions.to_target import step_times, steps_by_batch, time_to_target

CUTS = [(1, 2**power, 128 // 2**power) for power in range(8)]
EQUAL = (1.0,) * 8
UNEQUAL = (0.3, 0.3, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0)


def candidates(rng, n, spread, scale=0.05):
    """Every cut has n timed runs; all share the steps of their trajectories."""
    table = pd.DataFrame(
        [
            {**dict(zip(FACTORS, cut, strict=True)), "step_time_s": math.exp(log)}
            for cut, logs in zip(CUTS, spread, strict=False)
            for log in scale * logs * rng.standard_normal(n)
        ]
    )
    reaches = pd.DataFrame(
        {"global_batch_size": 128, "seed": range(n), "steps_to_target": 100 + np.arange(n)}
    )
    cuts = CUTS[: len(spread)]
    return time_to_target(steps_by_batch(reaches), step_times(table, cuts)), table


def coverage(n, spread, simulations, seed=1):
    """Return how often the slowest over the fastest is covered: for all pairs, and for one."""
    rng = np.random.default_rng([seed, n])
    covered = np.zeros(2)
    for _ in range(simulations):
        rows, _ = candidates(rng, n, spread)
        fastest = rows.loc[rows["time_s"].idxmin()]
        for place, compared in enumerate((len(rows), 2)):
            compared_rows = compare_with(rows, fastest, compared)
            slowest = compared_rows.loc[compared_rows["times_slower"].idxmax()]
            covered[place] += slowest["times_slower_low"] <= 1 <= slowest["times_slower_high"]
    return covered / simulations


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_slowest_of_eight_equal_cuts_is_covered(n):
    """Two standard errors of 100 simulations are 0.044; a single pair is covered far less."""
    chosen, alone = coverage(n, EQUAL, 100)
    assert 0.90 < chosen <= 1
    assert alone < chosen
    if n == 10:
        assert alone < 0.75


def test_the_interval_of_a_pair_is_that_of_games_and_howell():
    rows, table = candidates(np.random.default_rng(3), 5, UNEQUAL)
    compared = compare_with(rows, rows.iloc[0], 8)
    logs = np.log(table["step_time_s"].to_numpy()).reshape(8, 5)
    first, last = logs[0], logs[-1]
    parts = np.array([first.var(ddof=1), last.var(ddof=1)]) / 5
    degrees = parts.sum() ** 2 / (parts**2 / 4).sum()
    half = stats.studentized_range.ppf(0.95, 8, degrees) / math.sqrt(2) * math.sqrt(parts.sum())
    ends = np.exp(last.mean() - first.mean() + np.array([-half, half]))
    row = compared.iloc[-1]
    assert [row["times_slower_low"], row["times_slower_high"]] == pytest.approx(ends, rel=1e-4)
    # Two that nothing chose are compared by Welch's t.
    two = compare_with(rows.iloc[[0, 7]], rows.iloc[0], 2).iloc[-1]
    half = stats.t.ppf(0.975, degrees) * math.sqrt(parts.sum())
    assert two["times_slower_high"] == pytest.approx(
        math.exp(last.mean() - first.mean() + half), rel=1e-5
    )


@pytest.mark.parametrize("k", [2, 30])
def test_the_quantile_is_that_of_the_studentized_range(k):
    degrees = np.array([1.0, 1.7, 9.0, 200.0])
    expected = stats.studentized_range.ppf(0.95, k, degrees) / math.sqrt(2)
    assert pair_quantile(k, degrees) == pytest.approx(expected, rel=1e-3)
    assert np.isnan(pair_quantile(k, [math.nan, 0.0])).all()


if __name__ == "__main__":
    for n, name, spread in (
        *((3, "equal", EQUAL), (5, "equal", EQUAL), (10, "equal", EQUAL)),
        (3, "unequal", UNEQUAL),
    ):
        chosen, alone = coverage(n, spread, 1000)
        print(f"| 8 | {n} | {name} | {chosen:.3f} | {alone:.3f} |", flush=True)
