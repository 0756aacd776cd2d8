"""Power laws against another library."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from batchscape.analysis.tradeoff.scaling import scaling_law
from batchscape.errors import AnalysisError


def test_law_is_a_regression_of_logarithms():
    rng = np.random.default_rng(0)
    sizes = np.array([85, 151, 302, 604, 1200])
    critical = 90 * sizes**0.47 * np.exp(rng.normal(0, 0.05, 5))
    law = scaling_law(sizes, critical)
    found = stats.linregress(np.log(sizes), np.log(critical))
    reach = stats.t.ppf(0.975, 3)
    assert law.exponent.value == pytest.approx(found.slope)
    assert law.exponent.high == pytest.approx(found.slope + reach * found.stderr)
    assert law.coefficient.value == pytest.approx(math.exp(found.intercept))
    low = math.exp(found.intercept - reach * found.intercept_stderr)
    assert law.coefficient.low == pytest.approx(low)
    assert law.predict(302) == pytest.approx(law.table["fitted"][2])


def test_missing_critical_batches_are_left_out():
    law = scaling_law([1, 2, 4, 8], [1, math.nan, 16, 64])
    assert law.exponent.value == pytest.approx(2)
    assert law.exponent.n == 3
    two = scaling_law([1, 2], [1, 2])
    assert math.isnan(two.exponent.low)
    assert two.exponent.note == "two sizes: no interval"


@given(st.floats(-2, 2), st.floats(0.01, 100))
def test_exact_laws_are_recovered(exponent, coefficient):
    sizes = [1.0, 3.0, 10.0, 50.0]
    law = scaling_law(sizes, [coefficient * size**exponent for size in sizes])
    assert law.exponent.value == pytest.approx(exponent, abs=1e-9)
    assert law.coefficient.value == pytest.approx(coefficient)


@pytest.mark.parametrize(
    ("sizes", "critical", "words"),
    [
        ([1, 2], [1], "every size needs"),
        ([1, 1], [1, 2], "two different sizes"),
        ([1, -2], [1, 2], "above zero"),
        ([1, 2], [1, math.inf], "finite"),
    ],
)
def test_bad_input_is_refused(sizes, critical, words):
    with pytest.raises(AnalysisError, match=words):
        scaling_law(sizes, critical)
