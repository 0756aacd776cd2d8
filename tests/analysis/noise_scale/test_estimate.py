"""Intervals of the noise scale, against brute force and known truths."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from batchscape.analysis import find_cells, load
from batchscape.analysis.noise_scale import estimate as estimate_module
from batchscape.analysis.noise_scale.estimate import (
    NOT_IDENTIFIED,
    _interval,
    cell_noise_scales,
    fieller_interval,
    noise_scale_curves,
    run_noise_scales,
)
from batchscape.record.noise_scale import estimate, noise_samples

SMALL, BIG = 8, 32
LENGTH = 64


def sampled(rng, n, noise=300.0, signal=10.0, dimensions=16, every=5):
    """Rows of optimizer steps, every fifth sampled, from drawn gradients of a known scale.

    Parameters
    ----------
    noise, signal : float or array, shape (n,)
    """
    noise, signal = np.broadcast_to(noise, n), np.broadcast_to(signal, n)
    spectrum = 1 / np.arange(1, dimensions + 1)
    deviations = np.sqrt(noise[:, None, None] / SMALL * spectrum / spectrum.sum())
    gradient = np.sqrt(signal / dimensions)[:, None, None]
    means = gradient + rng.normal(size=(n, BIG // SMALL, dimensions)) * deviations
    steps = np.arange(1, n * every + 1)
    rows = pd.DataFrame(
        {
            "optimizer_step": steps,
            "samples": steps * BIG,
            "tokens": steps * BIG * LENGTH,
            "global_batch_size": BIG,
            "gradient_norm": 1.0,
            "small_batch_size": np.nan,
            "small_gradient_square": np.nan,
        }
    )
    turn = rows.index[every - 1 :: every]
    rows.loc[turn, "gradient_norm"] = np.linalg.norm(means.mean(axis=1), axis=-1)
    rows.loc[turn, "small_batch_size"] = SMALL
    rows.loc[turn, "small_gradient_square"] = (means**2).sum(axis=-1).mean(axis=1)
    return rows


def one_run(steps):
    """The figures of a single run."""
    where = {"sweep_dir": "sweep", "run_id": "run"}
    return run_noise_scales(pd.DataFrame([where]), steps.assign(**where)).iloc[0]


@given(
    st.floats(-3, 3),
    st.floats(-3, 3),
    st.floats(0.05, 1.5),
    st.floats(0.05, 1.5),
    st.floats(-0.95, 0.95),
    st.integers(1, 50),
)
def test_interval_holds_exactly_the_compatible_ratios(u, v, su, sv, correlation, degrees):
    covariance = np.array([[su**2, correlation * su * sv], [correlation * su * sv, sv**2]])
    low, high = fieller_interval(np.array([u, v]), covariance, degrees)
    t = stats.t.ppf(0.975, degrees)
    ratios = np.concatenate([[0.0], np.geomspace(1e-4, 1e6, 4001)])
    variance = su**2 - 2 * ratios * correlation * su * sv + ratios**2 * sv**2
    compatible = ratios[(u - ratios * v) ** 2 <= t**2 * variance * (1 + 1e-9)]
    if math.isnan(low):
        assert not len(compatible)
        assert math.isnan(high)
        return
    step = ratios[2] / ratios[1]
    # Between the ends may lie ratios that are not compatible, beyond them none that are.
    assert compatible[0] == pytest.approx(low, rel=step - 1, abs=1.1e-4)
    if math.isinf(high):
        # Then arbitrarily large ratios are compatible, or v would have to be below zero.
        assert v**2 <= t**2 * sv**2 * (1 + 1e-9)
    else:
        assert min(high, ratios[-1]) == pytest.approx(compatible[-1], rel=step - 1, abs=1.1e-4)


def variance_of_code(weights):
    """The matrix M whose x'Mx is the variance that the code finds for steps x, and its degrees."""
    n, calls = len(weights), []

    def record(_mean, covariance, degrees):
        calls.append((covariance[0, 0], degrees))
        return 0.0, 1.0

    def of(*places):
        values = np.zeros((n, 2))
        values[list(places), 0] = 1.0
        _interval(values, weights)
        return calls[-1][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate_module, "fieller_interval", record)
        alone = np.array([of(i) for i in range(n)])
        matrix = np.diag(alone)
        for i in range(n):
            for j in range(i):
                matrix[i, j] = matrix[j, i] = (of(i, j) - alone[i] - alone[j]) / 2
    (degrees,) = {degrees for _, degrees in calls}
    return matrix, degrees


@pytest.mark.parametrize("n", [2, 3, 12, 30])
@pytest.mark.parametrize("half_life", [5.0, math.inf])
def test_variance_and_degrees_of_freedom_are_those_of_the_quadratic_form(n, half_life):
    """Of independent normal steps, x'Mx has mean tr M and variance 2 tr M^2.

    The mean must be the variance of the weighted mean, and a chi-square with 2 mean^2 / variance
    degrees has the same spread.
    """
    weights = 0.5 ** (np.arange(n)[::-1] / half_life)
    matrix, degrees = variance_of_code(weights)
    assert np.trace(matrix) == pytest.approx((weights**2).sum() / weights.sum() ** 2)
    # A constant that all steps share is no spread.
    assert matrix.sum(axis=0) == pytest.approx(np.zeros(n), abs=1e-12)
    assert degrees == pytest.approx(np.trace(matrix) ** 2 / (matrix**2).sum())
    if math.isinf(half_life):
        # Von Neumann et al. 1941.
        assert degrees == pytest.approx(2 * (n - 1) ** 2 / (3 * n - 4))


@pytest.mark.parametrize(
    ("n", "drift"),
    [(5, 0.0), (10, 0.0), (40, 0.0), (40, 3.0)],
    ids=["5", "10", "40", "40, drifting"],
)
def test_coverage(n, drift):
    """With a drift the truth is the ratio of the means over the trajectory."""
    draws = 400
    signal = 30 * np.exp(-drift * np.arange(n) / n)
    drawn = sampled(np.random.default_rng(n), n * draws, 300.0, np.tile(signal, draws), every=1)
    steps = drawn.assign(sweep_dir="sweep", run_id=np.repeat(np.arange(draws).astype(str), n))
    table = run_noise_scales(steps[["sweep_dir", "run_id"]].drop_duplicates(), steps)
    truth = 300 / signal.mean()
    covered = ((table["low"] <= truth) & (truth <= table["high"])).sum()
    # 95 %, half a percent more or less, up to what 400 draws can tell.
    assert stats.binom.ppf(0.001, draws, 0.945) <= covered <= stats.binom.ppf(0.999, draws, 0.955)


def test_figures_of_a_run():
    steps = sampled(np.random.default_rng(3), 60)
    row = one_run(steps)
    assert row["estimate"] == estimate(steps)
    assert row["low"] < 30 < row["high"]
    assert (row["n"], row["n_runs"], row["method"]) == (60, 1, "Fieller over steps")
    assert (row["b_small"], row["b_big"]) == (SMALL, BIG)
    assert row["tokens_per_sample"] == LENGTH
    for name in ("estimate", "low", "high"):
        assert row[f"{name}_tokens"] == pytest.approx(LENGTH * row[name])
    assert row["note"] is None


def test_a_signal_that_drowns_is_not_identified():
    """The lower end still says what is known: the scale is large."""
    steps = sampled(np.random.default_rng(0), 30, noise=30_000.0, signal=1.0)
    row = one_run(steps)
    assert row["note"] == NOT_IDENTIFIED
    assert row["high"] == math.inf
    assert 32 < row["low"] < 30_000


def test_a_single_sample_has_no_interval():
    row = one_run(sampled(np.random.default_rng(0), 1))
    assert row["n"] == 1
    assert row["low"] != row["low"]
    assert row["note"] == NOT_IDENTIFIED


def test_a_run_without_samples_has_no_row():
    steps = sampled(np.random.default_rng(0), 3)
    steps["small_gradient_square"] = np.nan
    where = {"sweep_dir": "sweep", "run_id": "run"}
    table = run_noise_scales(pd.DataFrame([where]), steps.assign(**where))
    assert table.empty
    assert table["estimate"].dtype == float


@pytest.fixture
def sweep(build):
    """Cells, and a way to give their runs rows of known noise: `fill(noise_of_each_run)`."""
    builder = build()
    for seed in range(3):
        builder.run((1, 8, 4), seed=seed)
    builder.run((1, 8, 4), seed=0, timing_repeat=1)
    builder.run((2, 8, 2), seed=0)
    builder.run((1, 8, 4), seed=7, status="diverged")
    tables = load(builder.path)
    runs = tables.runs.reset_index(drop=True)

    def fill(rows_of_run):
        parts = [
            rows_of_run(run).assign(sweep_dir=run.sweep_dir, run_id=run.run_id)
            for run in runs.itertuples()
        ]
        return find_cells(runs), pd.concat(parts, ignore_index=True)

    return fill


def trajectory_rows(run, n=40, **settings):
    """Rows that timing repeats share."""
    return sampled(np.random.default_rng(int(run.trajectory_id, 16)), n, **settings)


def test_a_cell_rests_on_its_trajectories(sweep):
    cells, steps = sweep(trajectory_rows)
    table = cell_noise_scales(cells, steps)
    alone, many = table.sort_values("n_runs").index
    assert table.loc[alone, ["n", "n_runs", "method"]].tolist() == [40, 1, "Fieller over steps"]
    # Neither the timing repeat nor the diverged run is a further draw.
    assert table.loc[many, ["n", "n_runs", "method"]].tolist() == [3, 3, "Fieller over runs"]
    runs = cells.runs[cells.runs["cell"].eq(many) & cells.runs["status"].eq("completed")]
    runs = runs.drop_duplicates("trajectory_id")
    means = np.array(
        [
            parts_of(steps[steps["run_id"].eq(run_id) & steps["small_batch_size"].notna()]).mean(0)
            for run_id in runs["run_id"]
        ]
    )
    assert table.loc[many, "estimate"] == pytest.approx(np.divide(*means.mean(axis=0)))
    low, high = fieller_interval(means.mean(axis=0), np.cov(means.T) / 3, 2)
    logs = np.log(means[:, 0] / means[:, 1])
    half = stats.t.ppf(0.975, 2) * stats.sem(logs)
    centre = np.log(table.loc[many, "estimate"])
    expected = min(low, np.exp(centre - half)), max(high, np.exp(centre + half))
    assert tuple(table.loc[many, ["low", "high"]]) == pytest.approx(expected)


def parts_of(rows):
    """Both parts of the ratio, a row a step, by the formulas of McCandlish et al."""
    small, big = rows["small_gradient_square"], rows["gradient_norm"] ** 2
    noise = (small - big) / (1 / SMALL - 1 / BIG)
    return np.column_stack([noise, (BIG * big - SMALL * small) / (BIG - SMALL)])


def test_curves_are_debiased_moving_averages(sweep):
    """Each point against the recursion with its correction, as training frameworks write it."""
    growth = np.repeat([1.0, 2.0, 4.0, 8.0], 10)
    cells, steps = sweep(lambda run: trajectory_rows(run, noise=150 * growth))
    curves = noise_scale_curves(cells, steps)
    assert curves.groupby("cell").size().unique().tolist() == [4]
    for cell, curve in curves.groupby("cell"):
        # Forty sampled steps, each the fifth of five, ten a half-life.
        assert curve["samples"].tolist() == [50 * k * BIG for k in range(1, 5)]
        assert curve["half_life_samples"].eq(50 * BIG).all()
        assert (curve["tokens"] == LENGTH * curve["samples"]).all()
        runs = cells.runs[cells.runs["cell"].eq(cell) & cells.runs["status"].eq("completed")]
        means = []
        for run_id in runs.drop_duplicates("trajectory_id")["run_id"]:
            rows = steps[steps["run_id"].eq(run_id) & steps["small_batch_size"].notna()]
            decay, average, points = 0.5 ** (1 / 10), np.zeros(2), []
            for k, part in enumerate(parts_of(rows), start=1):
                average = decay * average + (1 - decay) * part
                if k % 10 == 0:
                    points.append(average / (1 - decay**k))
            means.append(points)
        expected = np.mean(means, axis=0)
        assert curve["estimate"].to_numpy() == pytest.approx(expected[:, 0] / expected[:, 1])
        assert curve["estimate"].is_monotonic_increasing


@pytest.mark.parametrize("n", [3, 5, 10])
def test_few_runs_of_a_skewed_population_cover_their_scale(n):
    """Lognormal noise with a standard deviation of 1: by Fieller alone it is 84 %."""
    rng, draws = np.random.default_rng(9), 600
    truth = np.exp(0.5) / np.exp(0.005)
    covered = alone = 0
    for _ in range(draws):
        values = np.exp(rng.standard_normal((n, 2)) * [1.0, 0.1])
        low, high = _interval(values, None)
        covered += low <= truth <= high
        low, high = fieller_interval(values.mean(axis=0), np.cov(values.T) / n, n - 1)
        alone += low <= truth <= high
    assert covered / draws > 0.88
    assert alone / draws < 0.87


@pytest.mark.parametrize("drift", [0.0, 3.0])
def test_coverage_of_a_moving_average(drift):
    """The truth is the ratio of the same averages of what the steps were drawn from."""
    draws, n = 400, 40
    signal = 30 * np.exp(-drift * np.arange(n) / n)
    rng = np.random.default_rng(8)
    weights = 0.5 ** (np.arange(n - 1, -1, -1) / 10)
    truth = 300 / np.average(signal, weights=weights)
    drawn = sampled(rng, n * draws, 300.0, np.tile(signal, draws), every=1)
    covered = 0
    for rows in np.split(noise_samples(drawn)[["noise", "signal"]].to_numpy(), draws):
        low, high = _interval(rows, weights)
        covered += low <= truth <= high
    assert stats.binom.ppf(0.001, draws, 0.945) <= covered <= stats.binom.ppf(0.999, draws, 0.955)


def test_points_that_a_run_did_not_reach_are_left_out(sweep):
    """Else the curve would jump to what the others have."""
    sizes = {0: 40, 1: 20, 2: 40}
    cells, steps = sweep(lambda run: trajectory_rows(run, n=sizes.get(run.seed, 40)))
    curves = noise_scale_curves(cells, steps)
    (many,) = {cell for cell, n in curves.groupby("cell")["n_runs"].max().items() if n == 3}
    curve = curves[curves["cell"].eq(many)]
    assert curve["n_runs"].eq(3).all()
    assert curve["samples"].max() <= 20 * 5 * BIG
