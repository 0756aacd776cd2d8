"""Least squares over cells: against statsmodels, and what the cells do not determine."""

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats

from batchscape.analysis.cost.linear import fit_linear

TERMS = ["fixed", "slope", "copies"]


def made(rng, cells=8, runs=3, noise=0.05):
    micro = rng.choice([1, 2, 4, 8, 16, 32], cells).astype(float)
    design = np.column_stack([np.ones(cells), micro, rng.permutation(np.arange(cells) % 2)])
    truth = design @ [2.0, 0.5, 1.0]
    measured = [t * np.exp(noise * rng.standard_normal(runs)) for t in truth]
    return design, measured


def term(fit, name):
    """Estimate one coefficient."""
    return fit.combine([float(name == each) for each in TERMS[: len(fit.coefficients)]])


@pytest.mark.parametrize("seed", range(5))
def test_least_squares_of_the_cell_means_are_those_of_statsmodels(seed):
    design, measured = made(np.random.default_rng(seed))
    fit = fit_linear(design, measured)
    means = np.array([cell.mean() for cell in measured])
    oracle = sm.OLS(means, design).fit()
    np.testing.assert_allclose(fit.coefficients, oracle.params, rtol=1e-9)
    np.testing.assert_allclose(fit.covariance, oracle.cov_params(), rtol=1e-7, atol=1e-12)
    ends = np.array([term(fit, name).interval() for name in TERMS])
    np.testing.assert_allclose(ends, oracle.conf_int(0.05), rtol=1e-7)
    deleted = means - oracle.get_influence().resid_press
    np.testing.assert_allclose(fit.left_out, deleted, rtol=1e-8)


@pytest.mark.parametrize("seed", range(5))
def test_a_prediction_is_that_of_statsmodels_for_a_new_observation(seed):
    design, measured = made(np.random.default_rng(seed))
    new = [1.0, 24.0, 1.0]
    prediction = fit_linear(design, measured).predict(new)
    means = np.array([cell.mean() for cell in measured])
    frame = sm.OLS(means, design).fit().get_prediction([new]).summary_frame(alpha=0.05)
    assert prediction.value == pytest.approx(frame["mean"].iloc[0])
    np.testing.assert_allclose(
        prediction.interval(), frame[["obs_ci_lower", "obs_ci_upper"]].iloc[0], rtol=1e-8
    )


@pytest.mark.parametrize("seed", range(5))
def test_relative_errors_are_least_squares_weighted_by_the_fitted_values(seed):
    design, measured = made(np.random.default_rng(seed))
    fit = fit_linear(design, measured, is_relative=True)
    means = np.array([cell.mean() for cell in measured])
    oracle = sm.WLS(means, design, weights=fit.fitted**-2).fit()
    np.testing.assert_allclose(fit.coefficients, oracle.params, rtol=1e-6)
    np.testing.assert_allclose(fit.covariance, oracle.cov_params(), rtol=1e-5, atol=1e-12)


def test_a_left_out_cell_is_predicted_by_a_fit_without_it():
    design, measured = made(np.random.default_rng(3))
    fit = fit_linear(design, measured)
    for index, predicted in enumerate(fit.left_out):
        others = fit_linear(
            np.delete(design, index, axis=0), measured[:index] + measured[index + 1 :]
        )
        assert predicted == pytest.approx(others.combine(design[index]).value)


def test_terms_that_vary_together_are_not_told_apart_but_their_sum_is():
    design = np.array([[1.0, 4.0, 1.0], [1.0, 8.0, 1.0], [1.0, 16.0, 1.0]])
    fit = fit_linear(design, [[6.0], [8.0], [12.0]])
    assert np.isnan(term(fit, "fixed").value)
    assert np.isnan(term(fit, "copies").value)
    assert term(fit, "slope").value == pytest.approx(0.5)
    assert fit.combine([1.0, 10.0, 1.0]).value == pytest.approx(9.0)


def test_a_term_without_weight_anywhere_is_not_determined():
    fit = fit_linear([[1.0, 1.0, 0.0], [1.0, 2.0, 0.0]], [[1.0], [2.0]])
    assert np.isnan(term(fit, "copies").value)
    assert term(fit, "slope").value == pytest.approx(1.0)


def test_as_many_cells_as_terms_have_no_interval_unless_repeats_give_that_of_times():
    design = [[1.0, 1.0], [1.0, 2.0]]
    measured = [[1.0, 1.2], [2.0, 2.1]]
    assert np.isnan(term(fit_linear(design, measured), "slope").interval()).all()
    fit = fit_linear(design, measured, is_relative=True)
    assert fit.from_repeats
    # slope = mean2 - mean1, each of two runs, whose relative variance is pooled.
    means = np.mean(measured, axis=1)
    pooled = (np.var(measured, axis=1, ddof=1) / means**2).mean()
    half = stats.t.ppf(0.975, 2) * np.sqrt(pooled * (means**2 / 2).sum())
    assert term(fit, "slope").interval() == pytest.approx((0.95 - half, 0.95 + half))
    once = fit_linear(design, [[1.1], [2.05]], is_relative=True)
    assert not once.from_repeats
    assert np.isnan(term(once, "slope").interval()).all()
