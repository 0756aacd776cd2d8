"""Samples of runs against statsmodels, scipy and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.weightstats import CompareMeans, DescrStatsW, ttost_ind

from batchscape.analysis import (
    compare_samples,
    divergence_rate,
    divergence_rates,
    one_sided_test,
    pooled_spread,
    tost_unpaired,
)
from batchscape.errors import AnalysisError

ONE = np.array([2.4131, 2.4097, 2.4175, 2.4052, 2.4110])
OTHER = np.array([2.4220, 2.4009, 2.4360])
LOSS = "final_eval_loss"


def runs(**samples: np.ndarray) -> pd.DataFrame:
    parts = [pd.DataFrame({"optimizer": name, LOSS: values}) for name, values in samples.items()]
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("margin", [0.005, 0.02, 0.05])
def test_unpaired_equivalence_is_that_of_statsmodels(margin: float) -> None:
    result = tost_unpaired(ONE, OTHER, margin)
    p, _, _ = ttost_ind(ONE, OTHER, -margin, margin, usevar="unequal")
    assert result.p_equivalent == pytest.approx(p, rel=1e-9)
    assert (result.verdict == "equivalent") == (p < 0.05)
    both = CompareMeans(DescrStatsW(ONE), DescrStatsW(OTHER))
    assert (result.low, result.high) == pytest.approx(both.tconfint_diff(0.1, usevar="unequal"))
    assert result.n == 8


def test_samples_are_compared_as_statsmodels_does() -> None:
    third = ONE + 0.1
    table = runs(sgd=ONE, adam=OTHER, lion=third)
    adam, lion = compare_samples(table, LOSS, "optimizer", margin=0.05)
    assert (adam.reference, adam.other, adam.n_reference, adam.n_other) == ("sgd", "adam", 5, 3)
    both = CompareMeans(DescrStatsW(OTHER), DescrStatsW(ONE))
    _, p, freedom = both.ttest_ind(usevar="unequal")
    assert adam.p_different == pytest.approx(p, rel=1e-9)
    ends = both.tconfint_diff(0.05, usevar="unequal")
    assert (adam.difference.low, adam.difference.high) == pytest.approx(ends, rel=1e-9)
    assert f"{freedom:.3g} degrees" in adam.difference.method
    assert adam.difference.value == pytest.approx(OTHER.mean() - ONE.mean())
    # Holm: the smaller of two p values counts twice, the larger once.
    assert lion.p_adjusted == pytest.approx(2 * lion.p_different)
    assert adam.p_adjusted == pytest.approx(max(adam.p_different, 2 * lion.p_different))
    assert adam.equivalence is not None
    assert adam.equivalence.p_equivalent == tost_unpaired(OTHER, ONE, 0.05).p_equivalent
    (back,) = compare_samples(runs(sgd=ONE, adam=OTHER), LOSS, "optimizer", reference="adam")
    assert back.difference.value == pytest.approx(-adam.difference.value)


def test_samples_without_an_interval_say_why() -> None:
    (few,) = compare_samples(runs(a=ONE, b=OTHER[:1]), LOSS, "optimizer", margin=0.1)
    assert few.difference.value == pytest.approx(OTHER[0] - ONE.mean())
    assert "5 and 1 runs" in (few.difference.note or "")
    assert few.equivalence is not None
    assert few.equivalence.verdict == "not identified"
    lost = np.array([2.4, math.inf, 2.5])
    (comparison,) = compare_samples(runs(a=ONE, b=lost), LOSS, "optimizer")
    assert not comparison.difference.is_identified
    assert math.isnan(comparison.p_adjusted)
    with pytest.raises(AnalysisError, match="optimizer has a, and the reference is a"):
        compare_samples(runs(a=ONE), LOSS, "optimizer")
    table = runs(a=ONE, b=OTHER)
    holed = table.assign(**{LOSS: table[LOSS].where(table.index > 0)})
    with pytest.raises(AnalysisError, match="missing in 1 of 5 rows"):
        compare_samples(holed, LOSS, "optimizer")


@pytest.mark.parametrize("alternative", ["less", "greater"])
@pytest.mark.parametrize("constant", [2.405, 2.412, 2.42])
def test_a_mean_against_a_constant_is_that_of_scipy(alternative: str, constant: float) -> None:
    result = one_sided_test(runs(a=ONE), LOSS, constant, alternative=alternative)
    expected = stats.ttest_1samp(ONE, constant, alternative=alternative)
    assert result.p == pytest.approx(expected.pvalue, rel=1e-9)
    ends = expected.confidence_interval(0.95)
    assert (result.mean.low, result.mean.high) == pytest.approx(tuple(ends))
    assert result.verdict == ("shown" if expected.pvalue < 0.05 else "not shown")
    one = one_sided_test(runs(a=ONE[:1]), LOSS, constant, alternative=alternative)
    assert (one.verdict, one.mean.value) == ("not identified", ONE[0])


def test_the_spread_of_all_cells_is_pooled() -> None:
    rng = np.random.default_rng(3)
    parts = [(batch, rng.normal(batch, 0.2, n)) for batch, n in ((8, 3), (16, 5), (32, 1))]
    table = pd.concat(
        [pd.DataFrame({"global_batch_size": batch, LOSS: values}) for batch, values in parts]
    )
    spread = pooled_spread(table, LOSS)
    squares = sum(((values - values.mean()) ** 2).sum() for _, values in parts)
    assert spread.value == pytest.approx(math.sqrt(squares / 6))
    assert spread.n == 8
    # The interval of statsmodels' test of a variance, inverted: at its ends p is 2.5 %.
    for end, tail in ((spread.low, stats.chi2.sf), (spread.high, stats.chi2.cdf)):
        assert tail(squares / end**2, 6) == pytest.approx(0.025, rel=1e-6)
    lost = pd.concat([table, pd.DataFrame({"global_batch_size": [8], LOSS: [math.inf]})])
    assert pooled_spread(lost, LOSS).value == pytest.approx(spread.value)
    assert "1 runs without a finite value" in (pooled_spread(lost, LOSS).note or "")
    assert not pooled_spread(table.tail(1), LOSS).is_identified


@pytest.mark.parametrize(("count", "n"), [(0, 3), (1, 12), (5, 5), (7, 40)])
def test_rates_of_divergence_are_those_of_statsmodels(count: int, n: int) -> None:
    table = pd.DataFrame({LOSS: [math.inf] * count + [2.0] * (n - count)})
    rate = divergence_rate(table)
    assert rate.value == count / n
    expected = proportion_confint(count, n, method="beta")
    assert (rate.low, rate.high) == pytest.approx(expected, abs=1e-9)
    assert "Clopper-Pearson" in rate.method


def test_rates_of_divergence_count_each_run_once() -> None:
    rows = pd.DataFrame(
        {
            "group": [0] * 4 + [1] * 2,
            "global_batch_size": [8] * 4 + [8] * 2,
            "target_loss": [3.0, 2.0] * 2 + [2.5] * 2,
            "outcome": ["reached", "censored", "diverged", "diverged", "reached", "diverged"],
        }
    )
    rates = divergence_rates(rows)
    assert rates[["group", "n", "diverged"]].to_numpy().tolist() == [[0, 2, 1], [1, 2, 1]]
    assert rates["low"].tolist() == pytest.approx([proportion_confint(1, 2, method="beta")[0]] * 2)
    with pytest.raises(AnalysisError, match="needs runs with outcome, status"):
        divergence_rate(pd.DataFrame({"x": [1]}))
    # At its lowest target a run may have diverged that reached a higher one; seeds tell runs apart.
    partial = rows.head(3).assign(seed=[0, 0, 1])
    assert (divergence_rate(partial).value, divergence_rate(partial).n) == (0.5, 2)


def test_a_missing_loss_is_no_divergence() -> None:
    losses = pd.DataFrame({LOSS: [2.0, math.nan, math.nan, math.nan, math.inf]})
    rate = divergence_rate(losses)
    assert (rate.value, rate.n) == (0.5, 2)
    assert rate.note == "1 of 2; 3 runs without outcome, status, final_eval_loss are left out"
    ended = losses.assign(status=["completed", "failed", "running", "completed", "completed"])
    assert divergence_rate(ended).note == "1 of 5"
    nothing = divergence_rate(losses.iloc[1:3])
    assert (nothing.is_identified, nothing.n) == (False, 0)
    assert divergence_rates(losses.iloc[1:3])[["n", "diverged"]].to_numpy().tolist() == [[0, 0]]


def test_runs_of_no_sample_are_refused() -> None:
    table = runs(a=ONE, b=OTHER)
    with pytest.raises(AnalysisError, match="optimizer is missing in 1 of 8 rows"):
        compare_samples(table.assign(optimizer=table["optimizer"].where(table.index > 0)), LOSS,
                        "optimizer")  # fmt: skip
