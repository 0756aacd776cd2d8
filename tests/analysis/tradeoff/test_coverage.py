"""Intervals cover known truths, in simulated sweeps with and without correlation of seeds."""

import math

import numpy as np
import pytest
from alternatives import ALTERNATIVES
from ground_truth import (
    BATCHES,
    multiplicative_critical,
    multiplicative_crossings,
    multiplicative_steps,
    noisy_log_steps,
    noisy_quadratic_steps,
)
from scipy import stats

from batchscape.analysis.tradeoff.forms import Data, fit_form, predicted
from batchscape.analysis.tradeoff.intervals import PATHS, band, intervals
from batchscape.analysis.tradeoff.noise import noise_of

SWEEPS = 400
SEEDS = (3, 5, 10)
CORRELATIONS = (0.0, 0.7)
NOISY_QUADRATIC = tuple(2**k for k in range(9))


def fitted(batches, log_steps, form="two_term"):
    data = Data(np.log(batches), log_steps)
    return data, fit_form(data, form)[0]


def quantities(theta):
    """Logarithms of the quantities that have intervals."""
    p, c, q = theta.T
    return {"critical_batch_size": c, "s_min": p, "e_min": p + c, "exponent": q}


def coverages(batches, values, truth, form="two_term"):
    """Fractions of sweeps, shape (sweeps, batch sizes, seeds), whose intervals hold the truth."""
    data, theta = fitted(batches, np.nanmean(values, axis=2), form)
    noise = noise_of(values)
    true, estimates = quantities(truth), quantities(theta)
    covered = {}
    for name, path in PATHS[form].items():
        low, high = intervals(data, noise, theta, path)
        inside = (estimates[name] + low <= true[name]) & (true[name] <= estimates[name] + high)
        covered[name] = inside.mean()
        if name == "critical_batch_size":
            overhead = [20 + 0.2 * np.exp(c) for c in (estimates[name] + low, true[name])]
            overhead.append(20 + 0.2 * np.exp(estimates[name] + high))
            covered["overhead"] = np.mean(
                (overhead[0] <= overhead[1]) & (overhead[1] <= overhead[2])
            )
    error, degrees = band(data, noise, theta, data.x, 2 if form == "two_term" else 3)
    reach = stats.t.ppf(0.975, degrees) * error
    curve = predicted(data.x, theta) - predicted(data.x, truth)
    covered["curve"] = (np.abs(curve) <= reach).mean()
    return covered


def check(covered):
    assert all(0.90 <= share <= 0.99 for share in covered.values()), covered


def test_multiplicative_noise_has_the_exact_critical_batch():
    for c, tolerance in ((0.01, 1e-5), (0.05, 1e-3), (0.3, 0.01)):
        steps = multiplicative_steps(BATCHES, c=c)
        _, theta = fitted(BATCHES, np.log(steps)[None])
        exact = multiplicative_critical(c=c)
        assert math.exp(theta[0, 1]) == pytest.approx(exact, rel=tolerance)
    # The published value at this learning rate, and the limit of small ones.
    assert multiplicative_critical(c=0.3) == pytest.approx(358, abs=0.5)
    assert multiplicative_critical(c=1e-6) == pytest.approx(256, rel=1e-5)


def test_coverage_in_a_few_sweeps():
    rng = np.random.default_rng(3)
    steps = np.log(multiplicative_steps(BATCHES))
    _, truth = fitted(BATCHES, steps[None])
    values = noisy_log_steps(rng, steps, 300, 3, sd=0.1, correlation=0.7)
    check(coverages(BATCHES, values, truth))


@pytest.mark.slow
@pytest.mark.parametrize("correlation", CORRELATIONS)
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("model", ["multiplicative", "noisy_quadratic"])
def test_coverage_about_exact_curves(model, seeds, correlation):
    rng = np.random.default_rng(seeds)
    batches = BATCHES if model == "multiplicative" else NOISY_QUADRATIC
    exact = multiplicative_steps if model == "multiplicative" else noisy_quadratic_steps
    steps = np.log(exact(batches))
    _, truth = fitted(batches, steps[None])
    values = noisy_log_steps(rng, steps, SWEEPS, seeds, sd=0.1, correlation=correlation)
    check(coverages(batches, values, truth))


@pytest.mark.slow
@pytest.mark.parametrize("correlation", CORRELATIONS)
@pytest.mark.parametrize("seeds", SEEDS)
def test_coverage_with_a_free_exponent(seeds, correlation):
    rng = np.random.default_rng(seeds)
    steps = np.log(100 + 100 * (200 / np.array(BATCHES)) ** 0.9)
    _, truth = fitted(BATCHES, steps[None], "free_exponent")
    assert truth[0] == pytest.approx([math.log(100), math.log(200), math.log(0.9)], abs=1e-6)
    values = noisy_log_steps(rng, steps, SWEEPS, seeds, correlation=correlation)
    check(coverages(BATCHES, values, truth, "free_exponent"))


@pytest.fixture(scope="module")
def many_trainings():
    """Mean log steps over 4000 seeds: what sweeps of few estimate."""
    values = multiplicative_crossings(np.random.default_rng(0), 400, 10)
    return values.mean(axis=(0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("shared_sd", [0.0, 0.06])
@pytest.mark.parametrize("seeds", SEEDS)
def test_coverage_of_trained_sweeps(seeds, shared_sd, many_trainings):
    _, truth = fitted(BATCHES, many_trainings[None])
    assert math.exp(truth[0, 1]) == pytest.approx(multiplicative_critical(), rel=0.01)
    rng = np.random.default_rng(seeds)
    values = multiplicative_crossings(rng, SWEEPS, seeds, shared_sd=shared_sd)
    if shared_sd:
        pairs = [
            np.corrcoef(a.ravel(), b.ravel())[0, 1]
            for a, b in zip(values.swapaxes(0, 1), values.swapaxes(0, 1)[1:], strict=False)
        ]
        assert np.mean(pairs) == pytest.approx(0.7, abs=0.12)
    check(coverages(BATCHES, values, truth))


@pytest.mark.slow
@pytest.mark.parametrize(
    "design", ["apart", "some missing", "one single", "few small", "few large"]
)
def test_coverage_where_batches_do_not_share_all_seeds(design):
    rng = np.random.default_rng(11)
    steps = np.log(multiplicative_steps(BATCHES))
    _, truth = fitted(BATCHES, steps[None])
    correlation = 0.0 if design == "apart" else 0.5
    values = noisy_log_steps(rng, steps, SWEEPS, 5, sd=0.1, correlation=correlation)
    if design == "apart":
        n = len(BATCHES)
        spread_seeds = np.full((SWEEPS, n, 5 * n), np.nan)
        for batch in range(n):
            spread_seeds[:, batch, 5 * batch : 5 * batch + 5] = values[:, batch]
        values = spread_seeds
    elif design == "some missing":
        for batch, seed in ((0, 1), (3, 4), (5, 0), (6, 2)):
            values[:, batch, seed] = np.nan
    elif design == "one single":
        values[:, 4, 1:] = np.nan
    else:
        few = slice(0, 4) if design == "few small" else slice(6, 8)
        values = noisy_log_steps(rng, steps, SWEEPS, 10, sd=0.1, correlation=correlation)
        values[:, few, 2:] = np.nan
    check(coverages(BATCHES, values, truth))


@pytest.mark.parametrize("n", [2, 5, 10])
def test_degrees_are_those_of_the_runs_that_decide(n):
    values = np.random.default_rng(0).standard_normal((3, 4, 10))
    noise = noise_of(values[:, :, :n])
    for weights in ([1.0, 1, 1, 1], [0.2, -3, 0, 1]):
        assert noise.variance(np.tile(weights, (3, 1)))[1] == pytest.approx(n - 1)
    values[:, 0, n:] = np.nan
    _, alone = noise_of(values).variance(np.tile([1.0, 0, 0, 0], (3, 1)))
    assert alone == pytest.approx(n - 1)
    _, mixed = noise_of(values).variance(np.tile([1.0, 1, 1, 1], (3, 1)))
    assert np.all((n - 1 <= mixed) & (mixed <= 9))


@pytest.mark.slow
def test_other_intervals_cover_less():
    rng = np.random.default_rng(5)
    truth = np.log(100 * (1 + 256 / np.array(BATCHES)))
    values = noisy_log_steps(rng, truth, 300, 3, correlation=0.7)
    covered = {}
    for name, interval in ALTERNATIVES.items():
        low, high = interval(np.log(BATCHES), values)
        covered[name] = ((low <= math.log(256)) & (math.log(256) <= high)).mean()
    assert 0.92 <= covered["score"] <= 0.98
    assert 0.92 <= covered["jackknife-t"] <= 0.98
    assert covered["percentile bootstrap by seed"] < 0.78
    assert covered["bootstrap-t"] < 0.88
