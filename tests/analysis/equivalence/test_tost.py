"""Two one-sided tests against other libraries, against simulation, and by their laws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from batchscape.analysis.equivalence.tost import (
    ALPHA,
    tost,
)

ONE = np.array([2.4131, 2.4097, 2.4175, 2.4052, 2.4110])
OTHER = np.array([2.4120, 2.4109, 2.4160, 2.4049, 2.4126])
APART = np.array([0.011, 0.013, 0.0145])


SOME = st.lists(st.floats(-1, 1), min_size=2, max_size=12)
MARGINS = st.floats(1e-4, 2)


@pytest.mark.parametrize(
    ("differences", "margin", "p"),
    [
        (ONE - OTHER, 0.005, 0.0006294838859905227),
        (ONE - OTHER, 0.001, 0.09294467984384559),
    ],
)
def test_statsmodels(differences, margin, p):
    """`ttost_paired(one, other, -margin, margin)[0]` of statsmodels 0.15.0."""
    result = tost(differences, margin)
    assert result.p_equivalent == pytest.approx(p, rel=1e-9)
    assert (result.verdict == "equivalent") == (p < ALPHA)


def test_statsmodels_interval_and_one_sided_test():
    """`DescrStatsW(...).tconfint_mean(alpha=0.1)` and `.ttest_mean(0.005, "larger")`."""
    result = tost(ONE - OTHER, 0.005)
    expected = (-0.0012896550957667658, 0.00132965509576685)
    assert (result.low, result.high) == pytest.approx(expected, rel=1e-9)
    apart = tost(APART, 0.005)
    assert apart.p_different == pytest.approx(0.008170123676028342, rel=1e-9)
    assert apart.verdict == "different"


@given(values=SOME, margin=MARGINS)
def test_scipy(values, margin):
    values = np.array(values)
    if values.std(ddof=1) < 1e-9:
        return
    result = tost(values, margin)
    p = max(
        stats.ttest_1samp(values, -margin, alternative="greater").pvalue,
        stats.ttest_1samp(values, margin, alternative="less").pvalue,
    )
    assert result.p_equivalent == pytest.approx(p, abs=1e-12)
    interval = stats.ttest_1samp(values, 0).confidence_interval(1 - 2 * ALPHA)
    assert (result.low, result.high) == pytest.approx(tuple(interval), abs=1e-12)


@given(values=SOME, margin=MARGINS)
def test_laws(values, margin):
    result = tost(values, margin)
    assert (result.verdict == "equivalent") == (result.smallest_margin < margin)
    assert (result.reason is None) == (result.verdict != "not identified")
    mirrored = tost([-value for value in values], margin)
    assert mirrored.verdict == result.verdict
    assert mirrored.p_equivalent == pytest.approx(result.p_equivalent, abs=1e-9)
    wider = tost(values, 2 * margin)
    assert wider.p_equivalent <= result.p_equivalent + 1e-12
    assert wider.p_different >= result.p_different - 1e-12
    if result.verdict == "different":
        assert abs(result.mean) > margin
        assert result.p_different < ALPHA


@pytest.mark.parametrize(
    ("values", "verdict", "p"),
    [
        ([0.0] * 3, "equivalent", 0.0),
        ([0.001] * 3, "equivalent", 0.0),
        ([0.5] * 2, "different", 1.0),
        ([-0.5] * 2, "different", 1.0),
        ([0.25] * 2, "not identified", 0.5),
        ([0.3], "not identified", math.nan),
        ([], "not identified", math.nan),
        ([0.0, math.inf, 0.0], "not identified", math.nan),
        ([math.inf, -math.inf], "not identified", math.nan),
    ],
)
def test_no_spread_no_pairs_and_no_end(values, verdict, p):
    result = tost(values, 0.25)
    assert result.verdict == verdict
    assert result.p_equivalent == pytest.approx(p, nan_ok=True)
    assert (result.reason is None) == (verdict != "not identified")


def test_differences_of_rounding_are_not_lost():
    result = tost([1e-16, -2e-16, 1e-16], 0.005)
    assert result.verdict == "equivalent"
    assert 0 < result.smallest_margin < 1e-15


@pytest.mark.parametrize(("n", "margin"), [(3, 2.66), (5, 1.6), (10, 1.005)])
def test_size_at_the_edge_of_the_margin(n, margin):
    """What differs by exactly the margin is called equivalent in at most 5 % of sweeps."""
    rng = np.random.default_rng(n)
    repeats = 1500
    samples = rng.normal(margin, 1.0, (repeats, n))
    wrong = np.mean([tost(sample, margin).verdict == "equivalent" for sample in samples])
    error = math.sqrt(ALPHA * (1 - ALPHA) / repeats)
    assert wrong < ALPHA + 3 * error
    # At this margin a single one-sided test decides nearly always: it is not timid either.
    assert wrong > ALPHA - 4 * error
    called = np.mean([tost(sample, margin).verdict == "different" for sample in samples])
    assert called == pytest.approx(ALPHA, abs=4 * error)
