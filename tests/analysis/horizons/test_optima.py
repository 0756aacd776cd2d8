"""Optima of batch and rate together: planted ones, hand-made fits, walls, and what is not told."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from planted_surface import BATCH, EXPONENTS, HORIZONS, RATE, optimum, sweep
from scipy.optimize import least_squares
from scipy.stats import binom, f

from batchscape.analysis.horizons.optima import NAMES, joint_optima
from batchscape.errors import AnalysisError

SWEEPS = 100


def values(fit, name):
    return [estimate.value for estimate in fit.optima[name].values()]


def test_without_noise_the_optimum_is_the_planted_one():
    fit = joint_optima(sweep())
    for name in NAMES:
        assert list(fit.optima[name]) == list(HORIZONS)
        for horizon, estimate in fit.optima[name].items():
            ends = (estimate.low, estimate.value, estimate.high)
            assert ends == pytest.approx([optimum(name, horizon)] * 3, rel=1e-9)
            assert estimate.note is None
        assert fit.exponents[name].value == pytest.approx(EXPONENTS[name], abs=1e-9)


def better_cells(runs):
    """Return a table of mean log losses of the better 17 of the 25 cells of each horizon."""
    logs = runs.assign(log=np.log(runs["cost"]))
    means = logs.groupby(["horizon", BATCH, RATE])["log"].mean().reset_index()
    return pd.concat([rows.nsmallest(17, "log") for _, rows in means.groupby("horizon")])


def test_a_search_for_the_centres_themselves_finds_the_same():
    """The same least squares with the optima as parameters, by a nonlinear solver."""
    runs = sweep(seeds=1, sd=0.08, rng=np.random.default_rng(4))
    kept = better_cells(runs)
    place = kept["horizon"].map(HORIZONS.index).to_numpy()
    x, y = (np.log(kept[name].to_numpy()) for name in NAMES)

    def residuals(parameters):
        (level, u, v), (a, b, c) = parameters[:12].reshape(3, 4), parameters[12:]
        dx, dy = x - u[place], y - v[place]
        return level[place] + a * dx * dx / 2 + b * dx * dy + c * dy * dy / 2 - kept["log"]

    start = [*[-3.0] * 4, *[math.log(8)] * 4, *[math.log(0.008)] * 4, 0.3, 0.0, 0.5]
    found = least_squares(residuals, start, xtol=1e-14, ftol=1e-14, gtol=1e-14).x
    fit = joint_optima(runs)
    assert np.log(values(fit, BATCH)) == pytest.approx(found[4:8], abs=1e-6)
    assert np.log(values(fit, RATE)) == pytest.approx(found[8:12], abs=1e-6)


def exponents_by_hand(runs, kept):
    """Fit the given cells by `lstsq`, and return the slopes of the optima over log horizon."""
    runs = runs.merge(kept[["horizon", BATCH, RATE]])
    own = pd.get_dummies(runs["horizon"]).to_numpy(dtype=float)
    x, y = (np.log(runs[name].to_numpy())[:, None] for name in NAMES)
    design = np.hstack([own, own * x, own * y, x * x / 2, x * y, y * y / 2])
    solution = np.linalg.lstsq(design, np.log(runs["cost"]), rcond=None)[0]
    a, b, c = solution[-3:]
    centres = np.linalg.solve([[a, b], [b, c]], -solution[4:-3].reshape(2, 4))
    return np.polyfit(np.log(HORIZONS), centres.T, 1)[0]


def test_the_interval_is_the_jackknife_of_seeds_by_hand():
    runs = sweep(seeds=3, sd=0.05, rng=np.random.default_rng(2))
    kept = better_cells(runs)
    without = [exponents_by_hand(runs[runs["seed"] != seed], kept) for seed in "012"]
    half = 4.302652729749462 * np.sqrt(2 / 3 * 3 * np.var(without, axis=0))
    middle = 3 * exponents_by_hand(runs, kept) - 2 * np.mean(without, axis=0)
    for estimate, value, reach in zip(joint_optima(runs).exponents.values(), middle, half,
                                      strict=True):  # fmt: skip
        ends = (estimate.value, estimate.low, estimate.high)
        assert ends == pytest.approx((value, value - reach, value + reach), abs=1e-7)
        assert estimate.method.startswith("jackknife-t over 3 seeds")


@pytest.mark.parametrize(("seeds", "together"), [(3, 0.0), (4, 0.8)])
def test_intervals_hold_the_truth_and_the_test_of_fit_its_level(seeds, together):
    rng = np.random.default_rng(seeds)
    held = dict.fromkeys(NAMES, 0)
    misfits = 0
    for _ in range(SWEEPS):
        fit = joint_optima(sweep(seeds=seeds, sd=0.08, together=together, rng=rng))
        misfits += fit.lack_of_fit_p < 0.05
        for name, truth in EXPONENTS.items():
            held[name] += fit.exponents[name].low <= truth <= fit.exponents[name].high
    low, high = binom.interval(0.999, SWEEPS, 0.95)
    assert all(low <= count <= high for count in held.values()), held
    # Horizons of one trunk have fewer independent residuals than the test counts.
    assert misfits <= binom.isf(0.001, SWEEPS, 0.15 if together else 0.05)


def test_the_test_of_fit_is_that_of_nested_models():
    """Each seed has a surface of its own; the wider model adds what every cell may differ by."""
    runs = sweep(seeds=3, sd=0.05, rng=np.random.default_rng(6))
    kept = better_cells(runs)
    m, p = len(kept), 15
    own = pd.get_dummies(kept["horizon"]).to_numpy(dtype=float)
    x, y = (np.log(kept[name].to_numpy())[:, None] for name in NAMES)
    surface = np.hstack([own, own * x, own * y, x * x, x * y, y * y])
    by_seed = kept[["horizon", BATCH, RATE]]
    losses = [by_seed.merge(rows)["cost"] for _, rows in runs.groupby("seed")]
    values, narrow = np.log(np.concatenate(losses)), np.kron(np.eye(3), surface)
    wide = np.hstack([narrow, np.tile(np.eye(m), (3, 1))])
    squares = [
        float(((values - design @ np.linalg.lstsq(design, values, rcond=None)[0]) ** 2).sum())
        for design in (narrow, wide)
    ]
    ratio = (squares[0] - squares[1]) / (m - p) / (squares[1] / (2 * (m - p)))
    expected = f.sf(ratio, m - p, 2 * (m - p))
    assert joint_optima(runs).lack_of_fit_p == pytest.approx(expected, rel=1e-6)


def test_what_is_no_quadratic_form_is_told():
    fit = joint_optima(sweep(sd=0.01, shape=lambda x, y: 0.1 * x * x + 0.8 * (np.exp(y) - 1 - y)))
    assert fit.lack_of_fit_p < 1e-6


def test_no_fit_reaches_beyond_a_wall_of_divergence():
    """The loss falls with the rate until all runs diverge, before it is lowest."""
    runs = sweep(shape=lambda x, y: 0.1 * x * x + 0.1 * (y - 0.8) ** 2)
    free = joint_optima(runs)
    assert np.divide(values(free, RATE), [optimum(RATE, h) for h in HORIZONS]) == pytest.approx(
        [math.exp(0.8)] * 4
    )
    ratio = runs[RATE] / (0.016 * np.sqrt(runs[BATCH] / 32))
    walled = joint_optima(runs.assign(cost=runs["cost"].mask(ratio > 1.2, math.inf)))
    for name in NAMES:
        for estimate in walled.optima[name].values():
            assert estimate.note == (
                "not identified: no lowest point of the fit within the grid, short of divergence"
            )
        assert "it takes three horizons with an optimum" in str(walled.exponents[name].note)
    assert math.isnan(walled.exponents[RATE].value)


def test_one_run_that_diverged_costs_its_cell_and_no_seed():
    runs = sweep(sd=0.05)
    last = runs["horizon"].eq(8192)
    best = runs[last].groupby([BATCH, RATE])["cost"].mean().idxmin()
    is_best = last & runs[BATCH].eq(best[0]) & runs[RATE].eq(best[1])
    one = is_best & runs["seed"].eq("1")
    lost = joint_optima(runs.assign(cost=runs["cost"].mask(one, math.inf)))
    all_lost = joint_optima(runs.assign(cost=runs["cost"].mask(is_best, math.inf)))
    assert lost == all_lost
    assert lost != joint_optima(runs)
    assert lost.exponents[RATE].n == 4


def test_a_cell_of_few_seeds_and_a_seed_of_few_cells_are_left_out():
    runs = sweep(sd=0.05)
    lone = runs.iloc[[0]].assign(learning_rate=0.5)
    added = pd.concat([runs[(runs["seed"] != "3") | (runs["horizon"] < 8192)], lone])
    assert joint_optima(added) == joint_optima(runs[runs["seed"] != "3"])


@pytest.mark.parametrize(
    "changes", [{"curvature": ((0.2, 0.6), (0.6, 0.8))}, {"horizons": (4, 8, 16)}]
)
def test_a_saddle_and_a_lowest_point_outside_of_the_grid_are_not_identified(changes):
    fit = joint_optima(sweep(**changes))
    estimates = [one for name in NAMES for one in fit.optima[name].values()]
    assert not any(one.is_identified for one in (*estimates, *fit.exponents.values()))


def test_an_exponent_takes_three_horizons():
    short = joint_optima(sweep(horizons=HORIZONS[:2])).exponents[RATE]
    assert short.note == "not identified: it takes three horizons with an optimum"
    single = joint_optima(sweep(horizons=HORIZONS[:1]))
    assert single.exponents == {}
    assert values(single, BATCH) == pytest.approx([optimum(BATCH, 1024)])


@pytest.mark.parametrize(
    "runs",
    [sweep(seeds=2).assign(cost=-1.0), sweep(seeds=2).drop(index=[0, 101])],
    ids=["no logarithm", "no seed of all cells"],
)
def test_what_cannot_be_fitted_is_refused(runs):
    with pytest.raises(AnalysisError, match="losses above 0 of seeds that ran at every batch"):
        joint_optima(runs)
