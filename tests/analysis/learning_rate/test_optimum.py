"""The best learning rate of a batch, against curves whose lowest point is known."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from batchscape.analysis.learning_rate.lowest_point import optimum_of
from batchscape.analysis.learning_rate.optimum import best_learning_rates, optimum_estimate
from batchscape.errors import AnalysisError

GRID = (0.001, 0.002, 0.004, 0.008, 0.016)


def sweep(cost, *, batches=(8,), rates=GRID, seeds=(0, 1, 2), noise=0.0, **columns):
    """One row a run: its loss is `cost(rate, batch)`, and noise that is known."""
    rng = np.random.default_rng(7)
    rows = [
        {
            "global_batch_size": batch,
            "learning_rate": rate,
            "seed": seed,
            "final_eval_loss": cost(rate, batch) + noise * rng.standard_normal() + seed,
            **columns,
        }
        for batch in batches
        for rate in rates
        for seed in seeds
    ]
    return pd.DataFrame(rows)


def bowl(best):
    return lambda rate, _: math.log(rate / best) ** 2


def only(table, value="final_eval_loss"):
    best = best_learning_rates(table, value)
    assert len(best) == 1
    return best.iloc[0]


def three(costs, rates=(0.001, 0.002, 0.004, 0.008, 0.016), **columns):
    """Three equal seeds with these losses."""
    by_rate = dict(zip(rates, costs, strict=True))
    table = sweep(lambda rate, _: by_rate[rate], rates=rates, **columns)
    return table.assign(final_eval_loss=table["final_eval_loss"] - table["seed"])


@given(best=st.floats(0.0021, 0.0079), level=st.floats(-5, 5), depth=st.floats(0.1, 10))
def test_a_parabola_is_found_exactly(best, level, depth):
    points = np.log(GRID)
    costs = np.tile(level + depth * (points - math.log(best)) ** 2, (3, 1)) + np.arange(3)[:, None]
    optimum = optimum_of(points, costs)
    assert optimum.value == pytest.approx(math.log(best), abs=1e-6)
    assert optimum.low - 1e-9 <= math.log(best) <= optimum.high + 1e-9


@pytest.mark.parametrize("factor", [math.sqrt(2), 2, math.sqrt(10)])
@pytest.mark.parametrize("place", [-0.4, 0.0, 0.4])
@pytest.mark.parametrize("power", [0.5, 1, 2])
def test_a_parabola_in_a_power_of_the_rate_is_found_exactly(factor, place, power):
    """A parabola in the logarithm put the lowest point of (rate - 1)^2 at 0.84."""
    rates = factor ** (np.arange(-6, 7) + place)
    optimum = optimum_of(np.log(rates), np.tile((rates**power - 1) ** 2, (3, 1)))
    assert math.exp(optimum.value) == pytest.approx(1, abs=1e-6)


def test_a_fine_grid_is_fitted_by_least_squares():
    """scipy's own search over power, level, depth and place, by the weights stated."""
    rates = np.geomspace(0.001, 0.016, 33)
    table = sweep(lambda rate, _: 4 * (rate / 0.005 - 1) ** 2, rates=rates, noise=0.05)
    mean = table.groupby("learning_rate")["final_eval_loss"].mean()
    x = np.log(rates / mean.idxmin())
    inside = np.flatnonzero(np.abs(x) <= math.log(3.2))
    positions = np.arange(max(inside[0] - 1, 0), min(inside[-1] + 2, len(x)))
    reach = np.abs(x[inside]).max()
    weights = np.sqrt(1 - 0.75 * np.clip(x[positions] / reach, -1, 1) ** 2)
    weights[~np.isin(positions, inside)] = 0.3

    def away(theta):
        level, depth, place, power = theta
        z = (np.exp(power * x[positions]) - math.exp(power * place)) / power
        return weights * (level + depth * z**2 - mean.to_numpy()[positions])

    place, power = optimize.least_squares(away, (1, 1, 0.01, 0.9)).x[2:]
    assert power == pytest.approx(1, abs=0.5)
    row = only(table)
    # Powers are tried in steps of an eighth.
    assert row["learning_rate"] == pytest.approx(mean.idxmin() * math.exp(place), rel=0.01)
    assert row["n_learning_rates"] == 33


def test_the_interval_is_fiellers_and_what_the_grid_leaves_open():
    """All points where the seeds' slopes are compatible with zero, by scipy's t-test.

    With three rates the power is 1/2, and powers 0 and 1 widen the interval; here 1 and the
    parabola of exp(-cost) lie above, and 0 below.
    """
    rng = np.random.default_rng(3)
    points = np.log([0.001, 0.002, 0.004])
    x = points - points[1]
    costs = x**2 + 0.02 * rng.standard_normal((6, 3))
    optimum = optimum_of(points, costs)
    assert "three" in optimum.note
    root = 2 * np.expm1(x / 2)
    tops = []
    for axis, values, back in (
        (root, costs.mean(axis=0), lambda z: 2 * math.log1p(z / 2)),
        (x, costs.mean(axis=0), float),
        (np.expm1(x), costs.mean(axis=0), math.log1p),
        (np.expm1(x), -np.exp(-costs.mean(axis=0)), math.log1p),
    ):
        top = np.polynomial.Polynomial.fit(axis, values, 2).deriv().roots()[0]
        tops.append(back(float(top)))
    value, straight, linear, gains = tops
    assert optimum.value == pytest.approx(points[1] + value, abs=1e-9)
    # Slope and curvature in the logarithm, at the lowest point.
    bends = np.polynomial.polynomial.polyfit(root, costs.T, 2)
    z, dz = 2 * math.expm1(value / 2), math.exp(value / 2)
    slope = (bends[1] + 2 * bends[2] * z) * dz
    bend = 2 * bends[2] * dz**2 + slope / 2
    tried = np.linspace(-0.6, 0.6, 20001)
    inside = tried[stats.ttest_1samp(slope[:, None] + bend[:, None] * tried, 0).pvalue >= 0.05]
    moved = abs(value - straight)
    below = max(moved, value - min(straight, linear, gains))
    above = max(moved, max(straight, linear, gains) - value)
    assert optimum.low == pytest.approx(optimum.value - math.hypot(inside[0], below), abs=2e-4)
    assert optimum.high == pytest.approx(optimum.value + math.hypot(inside[-1], above), abs=2e-4)


@pytest.mark.parametrize(
    ("costs", "edge", "low", "high"),
    [
        ((1, 2, 3, 4, 5), "lowest", 0.0, 0.002),
        ((5, 4, 3, 2, 1), "highest", 0.008, math.inf),
    ],
)
def test_the_edge_of_the_grid_bounds_the_optimum(costs, edge, low, high):
    row = only(three(costs))
    assert row["edge"] == edge
    assert not row["tuned"]
    assert math.isnan(row["learning_rate"])
    assert row["low"] == pytest.approx(low)
    assert row["high"] == pytest.approx(high)
    assert "not identified" in row["note"]
    assert "0.008" in row["note"] or "0.002" in row["note"]
    assert not optimum_estimate(row).is_identified


def test_noise_at_the_edge_gives_no_bound_that_it_does_not_hold():
    table = sweep(lambda rate, _: -0.001 * math.log(rate), noise=1.0)
    table = table[table["learning_rate"] >= 0.008]
    row = only(table)
    assert (row["low"], row["high"]) == (0, math.inf)
    assert "beyond or near it" in row["note"]


def test_diverged_runs_count_as_the_worst():
    table = three((3, 2, 1, 0.5, 0.1), status="completed")
    worst = (table["learning_rate"] == 0.016) & (table["seed"] == 0)
    table.loc[worst, ["status", "final_eval_loss"]] = ["diverged", math.nan]
    row = only(table)
    assert row["grid_learning_rate"] == 0.008
    # Beside a rate that may diverge no parabola can be laid.
    assert row["learning_rate"] == pytest.approx(0.008)
    assert (row["low"], row["high"]) == (pytest.approx(0.004), pytest.approx(0.016))
    assert "neighbour diverged" in row["note"]
    # Left out instead, the optimum would seem to lie at the edge.
    assert only(table[~worst & (table["seed"] > 0)])["edge"] == "highest"


def test_runs_that_failed_say_nothing():
    table = three((3, 2, 1, 2, 3), status="completed")
    broken = table.iloc[[0]].assign(seed=9, status="failed", final_eval_loss=math.nan)
    row = only(pd.concat([table, broken]))
    assert row["n"] == 3
    assert row["learning_rate"] == pytest.approx(0.004)


def test_steps_are_compared_on_a_log_scale():
    table = three([math.exp(c) for c in (2, 0.5, 0, 0.5, 2)]).rename(
        columns={"final_eval_loss": "steps_to_target"}
    )
    row = only(table, "steps_to_target")
    assert row["learning_rate"] == pytest.approx(0.004)
    assert row["value_at_best"] == pytest.approx(0.0)


def test_a_target_that_was_missed_is_infinitely_far():
    table = three((9, 8, 7, 6, math.nan)).rename(columns={"final_eval_loss": "steps_to_target"})
    assert only(table, "steps_to_target")["grid_learning_rate"] == 0.008
    nowhere = only(table.assign(steps_to_target=math.inf), "steps_to_target")
    assert math.isnan(nowhere["grid_learning_rate"])
    assert "at no learning rate" in nowhere["note"]
    assert not nowhere["tuned"]


def test_seeds_that_lack_a_rate_are_not_compared():
    """Seed 2 is the worst everywhere and lacks the best rate, which must not help that rate."""
    table = three((3, 2, 1, 0.9, 3))
    table["final_eval_loss"] += 10 * (table["seed"] == 2)
    row = only(table[~((table["seed"] == 2) & (table["learning_rate"] == 0.004))])
    assert row["grid_learning_rate"] == 0.008
    assert row["n"] == 2
    assert "2 seeds" in row["note"]


def test_another_number_of_rates_is_noted():
    table = sweep(bowl(0.004), batches=(8, 16))
    fewer = table[(table["global_batch_size"] == 8) | (table["learning_rate"] < 0.016)]
    best = best_learning_rates(fewer, "final_eval_loss")
    assert best["note"].str.contains("another number of rates").all()


def test_series_are_kept_apart():
    table = pd.concat(
        [sweep(bowl(0.003), group=0, target_loss=2.0), sweep(bowl(0.006), group=1, target_loss=2.0)]
    )
    best = best_learning_rates(table, "final_eval_loss").set_index("group")
    assert best.loc[0, "learning_rate"] == pytest.approx(0.003)
    assert best.loc[1, "learning_rate"] == pytest.approx(0.006)


def test_one_seed_has_no_interval_and_one_rate_no_optimum():
    alone = only(sweep(bowl(0.003), seeds=(0,)))
    assert alone["learning_rate"] == pytest.approx(0.003)
    assert math.isnan(alone["low"])
    single = only(sweep(bowl(0.003), rates=(0.004,)))
    assert single["edge"] == "single"
    assert math.isnan(single["learning_rate"])


def test_decompositions_of_one_trajectory_count_once():
    table = sweep(bowl(0.003), noise=0.1)
    table["trajectory_id"] = [f"t{i}" for i in range(len(table))]
    pd.testing.assert_series_equal(only(table), only(pd.concat([table, table])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop(columns="learning_rate"), "needs the columns learning_rate"),
        (lambda table: table.assign(learning_rate=0.0), "learning_rate is .* above 0 "),
        (lambda table: table.assign(final_eval_loss="low"), "final_eval_loss is a number"),
        (lambda table: pd.concat([table, table]), "rows that repeat"),
        (lambda table: table.assign(status="failed"), "no run has a result"),
    ],
)
def test_bad_tables_are_refused(change, message):
    with pytest.raises(AnalysisError, match=message):
        best_learning_rates(change(sweep(bowl(0.003))), "final_eval_loss")


def test_an_end_beyond_all_numbers_is_none():
    """A curvature that hardly differs from zero puts Fieller's end at any distance."""
    spread = np.array([-1.0, 0, 1]) / stats.t.ppf(0.975, 2) * math.sqrt(3) * (1 - 1e-10)
    root = {rate: 2 * (math.sqrt(rate) - 1) for rate in (0.5, 1.0, 2.0)}
    rows = [
        {
            "global_batch_size": 8,
            "learning_rate": rate,
            "seed": seed,
            "loss": (1 + share) * z**2 + 0.1 * share * z,
        }
        for seed, share in enumerate(spread)
        for rate, z in root.items()
    ]
    row = best_learning_rates(pd.DataFrame(rows), "loss").iloc[0]
    assert row["learning_rate"] == pytest.approx(1)
    assert math.inf in (row["high"], 1 / row["low"] if row["low"] else math.inf)


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_below_three_seeds_an_optimum_has_no_ends(seeds):
    alone = only(sweep(bowl(0.003), seeds=seeds, noise=0.01))
    assert alone["learning_rate"] == pytest.approx(0.003, rel=0.1)
    assert math.isnan(alone["low"])
    assert math.isnan(alone["high"])
    assert optimum_estimate(alone).text().endswith(f"(n = {len(seeds)})")


def test_a_rate_that_few_seeds_tried_does_not_cost_the_others():
    table = sweep(bowl(0.004), seeds=range(5), noise=0.01)
    new = sweep(bowl(0.004), rates=(0.006,), seeds=(0,))
    row, before = only(pd.concat([table, new])), only(table)
    assert row["n"] == 5
    assert row["learning_rate"] == before["learning_rate"]
    assert "0.006" in row["note"]
    # Half as many seeds are enough.
    more = sweep(bowl(0.004), rates=(0.006,), seeds=(0, 1, 2))
    assert only(pd.concat([table, more]))["n"] == 3


def test_a_rate_of_many_seeds_does_not_cost_a_grid_of_few():
    grid = sweep(bowl(0.004), seeds=range(3), noise=0.01)
    many = sweep(bowl(0.004), rates=(0.004,), seeds=range(3, 10))
    row = only(pd.concat([grid, many]))
    assert (row["n"], row["n_learning_rates"]) == (3, 5)
    # One seed elsewhere is no grid: the rate of many stands alone.
    alone = only(pd.concat([many, sweep(bowl(0.004), rates=(0.001, 0.002), seeds=(3,))]))
    assert (alone["n"], alone["edge"]) == (7, "single")
    # With one seed everywhere nothing is left out.
    assert only(sweep(bowl(0.004), seeds=(0,)))["n_learning_rates"] == 5
