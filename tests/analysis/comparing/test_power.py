"""The smallest detectable effect, by quadrature, against a published table and by simulation."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from batchscape.analysis.comparing.power import smallest_detectable_effect
from batchscape.errors import AnalysisError


def power_of(noncentrality: float, degrees: int, alpha: float) -> float:
    """The chance that |t| exceeds its critical value, over all values of its numerator.

    Given the numerator z, normal around the noncentrality, t is beyond where the scale is small
    enough: a chi-square. (The code integrates the other way round. Library functions of the
    noncentral t are no oracle: far in the tail they have no value, or another on each processor.)
    """
    critical = stats.t.ppf(1 - alpha / 2, degrees)

    def density(z: float) -> float:
        within = stats.chi2.cdf(degrees * (z / critical) ** 2, degrees)
        return float(stats.norm.pdf(z - noncentrality) * within)

    low, high = noncentrality - 9, noncentrality + 9
    edges = [low, 0.0, noncentrality, high] if low < 0 else [low, noncentrality, high]
    chance = sum(integrate.quad(density, *ends, epsabs=1e-11)[0] for ends in pairwise(edges))
    return float(chance)


@pytest.mark.parametrize(
    ("n", "alpha"), [(2, 0.05), *((n, alpha) for n in (3, 10, 40) for alpha in (0.05, 0.01))]
)
@pytest.mark.parametrize("power", [0.5, 0.8, 0.95])
def test_it_has_the_power_that_was_asked_for(n: int, power: float, alpha: float) -> None:
    one = smallest_detectable_effect(1.0, n, power=power, alpha=alpha) * math.sqrt(n)
    assert power_of(one, n - 1, alpha) == pytest.approx(power, abs=1e-6)
    two = smallest_detectable_effect(1.0, n, paired=False, power=power, alpha=alpha)
    assert power_of(two * math.sqrt(n / 2), 2 * n - 2, alpha) == pytest.approx(power, abs=1e-6)


@pytest.mark.parametrize(
    ("alpha", "sizes"),
    [(0.01, (586, 95, 38)), (0.05, (393, 64, 26)), (0.10, (310, 50, 20))],
)
def test_group_sizes_are_those_of_cohens_table(alpha: float, sizes: tuple[int, int, int]) -> None:
    """Runs in each of two groups for a small, medium and large effect, power 0.80.

    Source: Cohen 1992, A Power Primer, Psychological Bulletin 112, table 2, first row. Its numbers
    are rounded from those of his tables of 1988; one more or less is that rounding.
    """
    for effect, n in zip((0.2, 0.5, 0.8), sizes, strict=True):
        more, fewer = (
            smallest_detectable_effect(1.0, size, paired=False, alpha=alpha)
            for size in (n + 1, n - 1)
        )
        assert more < effect < fewer


@given(st.floats(1e-6, 1e6), st.integers(2, 30), st.booleans())
def test_it_scales_with_the_spread_and_falls_with_n(sd: float, n: int, paired: bool) -> None:
    one = smallest_detectable_effect(1.0, n, paired=paired)
    assert smallest_detectable_effect(sd, n, paired=paired) == pytest.approx(sd * one)
    assert smallest_detectable_effect(1.0, n + 1, paired=paired) < one


def test_four_in_five_simulated_sweeps_find_it() -> None:
    rng = np.random.default_rng(3)
    effect = smallest_detectable_effect(0.7, 5)
    values = rng.normal(effect, 0.7, (20_000, 5))
    is_significant = stats.ttest_1samp(values, 0, axis=1).pvalue < 0.05
    assert np.mean(is_significant) == pytest.approx(0.8, abs=0.01)


def test_what_cannot_be_said() -> None:
    assert math.isnan(smallest_detectable_effect(1.0, 1))
    assert math.isnan(smallest_detectable_effect(math.nan, 5))
    assert smallest_detectable_effect(0.0, 5) == 0
    with pytest.raises(AnalysisError, match="spread"):
        smallest_detectable_effect(-1.0, 5)
    with pytest.raises(AnalysisError, match="power=1"):
        smallest_detectable_effect(1.0, 5, power=1)
