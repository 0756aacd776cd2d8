"""Censoring against statsmodels, scipy and brute force."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from batchscape.analysis.targets.censoring import (
    kaplan_meier,
    kaplan_meier_note,
    median_with_infinity,
    performance_profile,
)
from batchscape.errors import AnalysisError

values = st.lists(st.floats(0.5, 100.0) | st.just(math.inf), min_size=1, max_size=30)


@given(values)
def test_a_median_is_that_of_numpy_wherever_it_has_one(found: list[float]) -> None:
    with np.errstate(invalid="ignore"):
        expected = float(np.median(found))
    assert median_with_infinity(found).value == pytest.approx(expected, rel=1e-12)


@given(values)
def test_the_interval_of_a_median_is_the_order_statistics_of_scipy(found: list[float]) -> None:
    finite = np.where(np.isinf(found), 1000.0, found)
    expected = stats.quantile_test(finite, q=0, p=0.5).confidence_interval(0.95)
    estimate = median_with_infinity(finite)
    n = len(found)
    ends = np.sort(finite)
    # scipy's own interval is the same pair, or one step wider where it takes P < alpha strictly.
    if n >= 6:
        k = next(k for k in reversed(range(1, n)) if 2 * stats.binom.cdf(k - 1, n, 0.5) <= 0.05)
        assert (estimate.low, estimate.high) == (ends[k - 1], ends[n - k])
        assert expected.low <= estimate.low
        assert estimate.high <= expected.high
    else:
        assert (estimate.low, estimate.high) == (0.0, math.inf)
        assert "bound a median" in str(estimate.note)


@pytest.mark.parametrize("n", [6, 9, 15])
def test_the_interval_of_a_median_covers_it(n: int) -> None:
    rng = np.random.default_rng(n)
    draws = np.exp(rng.normal(size=(4000, n)))
    draws[draws > np.exp(1.5)] = np.inf
    found = [median_with_infinity(draw) for draw in draws]
    covered = np.mean([estimate.low <= 1.0 <= estimate.high for estimate in found])
    assert 0.945 <= covered <= 0.999


def test_runs_that_ended_early_leave_a_median_open_or_do_not() -> None:
    open_ = median_with_infinity([10.0, 20.0, 15.0], [10.0, 20.0, math.inf])
    assert math.isnan(open_.value)
    assert "from 15 on" in str(open_.note)
    late = median_with_infinity([10.0, 20.0, 25.0], [10.0, 20.0, math.inf])
    assert late.value == 20.0
    assert median_with_infinity([10.0, math.inf]).value == math.inf


@pytest.mark.parametrize("low", [[], [math.nan], [-1.0]])
def test_a_median_of_nothing_is_refused(low: list[float]) -> None:
    with pytest.raises(AnalysisError, match="at least one value"):
        median_with_infinity(low)


survival_data = st.lists(
    st.tuples(st.integers(1, 8).map(float), st.booleans()), min_size=2, max_size=25
).filter(lambda rows: any(observed for _, observed in rows))


@settings(max_examples=40)
@given(survival_data)
def test_survival_is_that_of_scipy_with_its_log_log_interval(
    rows: list[tuple[float, bool]],
) -> None:
    durations = np.array([row[0] for row in rows])
    observed = np.array([row[1] for row in rows])
    found = kaplan_meier(durations, observed)
    data = stats.CensoredData(uncensored=durations[observed], right=durations[~observed])
    expected = stats.ecdf(data).sf
    assert found["survival"].to_numpy() == pytest.approx(expected.evaluate(found["time"]))
    with warnings.catch_warnings(action="ignore"):  # where nobody is left, both have none
        low, high = expected.confidence_interval(0.95, method="log-log")
    inside = found["survival"] > 0
    times = found["time"][inside]
    assert found["low"][inside].to_numpy() == pytest.approx(low.evaluate(times))
    assert found["high"][inside].to_numpy() == pytest.approx(high.evaluate(times))


def test_survival_and_its_error_are_those_of_statsmodels() -> None:
    from statsmodels.duration.survfunc import SurvfuncRight

    rng = np.random.default_rng(0)
    durations = np.round(rng.exponential(20.0, 60)) + 1
    observed = rng.random(60) < 0.7
    found = kaplan_meier(durations, observed)
    expected = SurvfuncRight(durations, observed)
    at = np.isin(expected.surv_times, found["time"])
    assert found["survival"].to_numpy() == pytest.approx(expected.surv_prob[at], rel=1e-12)
    assert found["at_risk"].to_numpy() == pytest.approx(expected.n_risk[at])
    inside = found["survival"] > 0
    errors = expected.surv_prob_se[at][inside]
    assert found["se"][inside].to_numpy() == pytest.approx(errors, rel=1e-12)


def test_a_run_that_diverged_stays_at_risk_for_ever() -> None:
    found = kaplan_meier([1.0, 2.0, 3.0, math.inf], [True, True, True, False])
    assert found["survival"].tolist() == [0.75, 0.5, 0.25]
    censored = kaplan_meier([1.0, 2.0, 3.0, 2.5], [True, True, True, False])
    assert censored["survival"].tolist() == [0.75, 0.5, 0.0]


def test_bad_durations_are_refused() -> None:
    for durations, observed in (([math.nan], [True]), ([-1.0], [False]), ([math.inf], [True])):
        with pytest.raises(AnalysisError, match="a duration is a number from 0 on"):
            kaplan_meier(durations, observed)


def test_informative_censoring_is_said() -> None:
    assert kaplan_meier_note(["reached", "censored"]) is None
    assert "cut because they did badly" in str(kaplan_meier_note(["reached", "pruned"]))
    assert "infinite" in str(kaplan_meier_note(["diverged"]))


def test_a_profile_is_that_of_a_count_by_hand() -> None:
    reaches = pd.DataFrame(
        {
            "global_batch_size": [8, 8, 16, 16, 32, 32],
            "seed": [0, 1] * 3,
            "samples_to_target": [100.0, 120.0, 150.0, np.nan, 400.0, 100.0],
        }
    )
    found = performance_profile(reaches, taus=[1.0, 1.5, 4.0])
    shares = found.pivot_table(index="global_batch_size", columns="tau", values="share")
    assert shares.loc[8].tolist() == [0.5, 1.0, 1.0]
    assert shares.loc[16].tolist() == [0.0, 0.5, 0.5]
    assert shares.loc[32].tolist() == [0.5, 0.5, 1.0]
    assert found["n"].eq(2).all()


@given(st.lists(st.floats(1.0, 50.0) | st.just(math.nan), min_size=4, max_size=4))
def test_a_profile_rises_and_someone_is_the_best(found: list[float]) -> None:
    reaches = pd.DataFrame(
        {"global_batch_size": [8, 8, 16, 16], "seed": [0, 1] * 2, "samples_to_target": found}
    )
    profile = performance_profile(reaches)
    for _, own in profile.groupby("global_batch_size"):
        assert own["share"].is_monotonic_increasing
    some = ~np.isnan(np.reshape(found, (2, 2))).all(axis=0)
    first = profile[profile["tau"].eq(1.0)]["share"].sum() if len(profile) else 0.0
    assert first >= some.mean()


def test_a_profile_needs_its_columns_and_factors() -> None:
    with pytest.raises(AnalysisError, match="needs the columns samples_to_target"):
        performance_profile(pd.DataFrame({"global_batch_size": [1]}))
    good = pd.DataFrame({"global_batch_size": [1], "samples_to_target": [1.0]})
    with pytest.raises(AnalysisError, match=r"from 1 on, got 0\.5"):
        performance_profile(good, taus=[0.5])
