"""How the best learning rate grows: which optima count, and too few batches say nothing."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from batchscape.analysis.learning_rate.exponent import (
    exponent_of,
    is_bounded,
    left_out_reason,
    rules_text,
)
from batchscape.analysis.learning_rate.optimum import best_learning_rates

BATCHES = np.array([4.0, 8, 16, 32, 64, 128, 256])
ROOT = 0.01 * np.sqrt(BATCHES)


def optima(rates, batches=BATCHES, **columns):
    return pd.DataFrame({"global_batch_size": batches, "learning_rate": rates, **columns})


def left_out(best):
    return [left_out_reason(row) for _, row in best[~is_bounded(best)].iterrows()]


@pytest.mark.parametrize(("rule", "power"), [("fixed", 0.0), ("sqrt", 0.5), ("linear", 1.0)])
def test_each_rule_is_recognised(rule, power):
    rng = np.random.default_rng(1)
    rates = 0.01 * BATCHES**power * np.exp(0.02 * rng.standard_normal(len(BATCHES)))
    text = rules_text(exponent_of(optima(rates)))
    assert text.startswith(f"Rules that the interval holds: {rule}. Outside")
    assert "holds: none. " in rules_text(exponent_of(optima(rates * BATCHES**0.3)))


def test_the_exponent_is_scipys_slope():
    rng = np.random.default_rng(2)
    rates = 0.01 * BATCHES**0.4 * np.exp(0.1 * rng.standard_normal(len(BATCHES)))
    line = stats.linregress(np.log(BATCHES), np.log(rates))
    half = stats.t.ppf(0.975, len(BATCHES) - 2) * line.stderr
    exponent = exponent_of(optima(rates))
    assert exponent.value == pytest.approx(line.slope)
    assert exponent.low == pytest.approx(line.slope - half)
    assert exponent.high == pytest.approx(line.slope + half)
    assert exponent.n == len(BATCHES)


def test_optima_at_the_edge_are_left_out_and_named():
    note = "not identified: the highest learning rate of the grid is the best, at least 0.1"
    table = optima(ROOT, low=ROOT / 2, high=ROOT * 2, note=[None] * 6 + [note])
    table.loc[6, "learning_rate"] = math.nan
    assert left_out(table) == [f"256: {note}"]
    assert exponent_of(table).n == 6


def test_optima_without_two_ends_are_left_out_and_the_interval_is_theirs():
    low, high = ROOT / 2, ROOT * 2
    low[1], high[2], low[4], high[4] = 0.0, math.inf, 0.0, math.inf
    table = optima(ROOT, low=low, high=high, note="the curvature is compatible with zero")
    assert left_out(table) == [
        "8: no rate is worse beyond the noise below the best one",
        "16: no rate is worse beyond the noise above the best one",
        "64: no rate is worse beyond the noise below or above the best one",
    ]
    exponent = exponent_of(table)
    logs = np.log(table.loc[is_bounded(table), "global_batch_size"])
    assert (exponent.n, len(logs)) == (4, 4)
    assert exponent.value == pytest.approx(0.5)
    # These optima lie on a line exactly, so that only their own intervals give it a width.
    half = math.log(2) / math.sqrt(((logs - logs.mean()) ** 2).sum())
    assert exponent.high - exponent.value == pytest.approx(half)
    assert "own intervals" in exponent.method


def test_two_optima_with_ends_give_no_exponent():
    high = np.where(BATCHES < 16, 1.0, math.inf)
    exponent = exponent_of(optima(ROOT, low=1e-4, high=high))
    assert not exponent.is_identified
    assert "2 global batches have an optimum bounded on both sides" in exponent.note


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_give_an_exponent_without_interval(seeds):
    rows = [
        {
            "global_batch_size": batch,
            "learning_rate": rate,
            "seed": seed,
            "final_eval_loss": math.log(rate / (0.01 * math.sqrt(batch))) ** 2 + seed,
        }
        for batch in BATCHES
        for rate in 0.005 * 2.0 ** np.arange(8)
        for seed in range(seeds)
    ]
    best = best_learning_rates(pd.DataFrame(rows))
    exponent = exponent_of(best)
    assert not left_out(best)
    assert exponent.value == pytest.approx(0.5, abs=1e-6)
    assert math.isnan(exponent.low)
    assert math.isnan(exponent.high)
    assert "fewer than three seeds" in exponent.note
    assert rules_text(exponent).startswith("Without its interval")


def test_no_optimum_at_all():
    table = optima(math.nan, edge="single")
    assert not exponent_of(table).is_identified
    assert len(left_out(table)) == 7


SHARED_RATES = Path(__file__).with_name("data") / "shared_rates.csv"


def test_optima_known_to_a_factor_of_two_give_an_exponent_as_wide():
    """Five batches whose best rate is the last before a wall, on grids that follow the root.

    Each optimum may lie anywhere between its neighbours, a factor of 2 away on either side: in
    these brackets lie lines of slopes 0 to 1. By hand, with those below the middle moved down and
    those above up, the slope is off by (2 + 1 + 0 + 1 + 2) / (4 + 1 + 0 + 1 + 4).
    """
    runs = pd.read_csv(SHARED_RATES).rename(
        columns={"batch_size": "global_batch_size", "lr": "learning_rate"}
    )
    best = best_learning_rates(runs.rename(columns={"steps": "steps_to_target"}), "steps_to_target")
    assert best["grid_factor"].tolist() == pytest.approx([2.0] * 5)
    exponent = exponent_of(best)
    assert exponent.value == pytest.approx(0.5)
    assert (exponent.low, exponent.high) == pytest.approx((-0.1, 1.1))
    assert "Outside" not in rules_text(exponent)
