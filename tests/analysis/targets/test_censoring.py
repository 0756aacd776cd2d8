"""Censoring against statsmodels, scipy and brute force."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from batchscape.analysis.targets.censoring import median_with_infinity

values = st.lists(st.floats(0.5, 100.0) | st.just(math.inf), min_size=1, max_size=30)


@given(values)
def test_a_median_is_that_of_numpy_wherever_it_has_one(values):
    with np.errstate(invalid="ignore"):
        expected = float(np.median(values))
    assert median_with_infinity(values)[0] == pytest.approx(expected, rel=1e-12)


@given(values)
def test_the_interval_of_a_median_is_the_order_statistics_of_scipy(values):
    finite = np.where(np.isinf(values), 1000.0, values)
    expected = stats.quantile_test(finite, q=0, p=0.5).confidence_interval(0.95)
    _, low, high = median_with_infinity(finite)
    n = len(values)
    ends = np.sort(finite)
    # scipy's own interval is the same pair, or one step wider where it takes P < alpha strictly.
    if n >= 6:
        k = next(k for k in reversed(range(1, n)) if 2 * stats.binom.cdf(k - 1, n, 0.5) <= 0.05)
        assert (low, high) == (ends[k - 1], ends[n - k])
        assert expected.low <= low
        assert high <= expected.high
    else:
        assert (low, high) == (0.0, math.inf)


@pytest.mark.parametrize("n", [6, 9, 15])
def test_the_interval_of_a_median_covers_it(n):
    rng = np.random.default_rng(n)
    draws = np.exp(rng.normal(size=(4000, n)))
    draws[draws > np.exp(1.5)] = np.inf
    medians = [median_with_infinity(draw) for draw in draws]
    covered = np.mean([low <= 1.0 <= high for _, low, high in medians])
    assert 0.945 <= covered <= 0.999


def test_runs_that_ended_early_leave_a_median_open_or_do_not():
    assert math.isnan(median_with_infinity([10.0, 20.0, 15.0], [10.0, 20.0, math.inf])[0])
    assert median_with_infinity([10.0, 20.0, 25.0], [10.0, 20.0, math.inf])[0] == 20.0
    assert median_with_infinity([10.0, math.inf])[0] == math.inf
