"""The three questions of a rule, against scipy and statsmodels, and their error rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.weightstats import DescrStatsW  # type: ignore[import-untyped]

from batchscape.analysis.claims.rules import (
    EQUIVALENCE_FEWEST,
    Decision,
    above,
    below,
    equal,
    every,
    some,
)
from batchscape.analysis.comparing.pairs import Contrast

NUMBERS = st.lists(
    st.lists(st.floats(-2, 2).map(lambda x: round(x, 3)), min_size=3, max_size=6),
    min_size=1,
    max_size=4,
)


def contrasts(*values: list[float]) -> list[Contrast]:
    return [
        Contrast(str(n), np.array(differences), (f"run-{n}",))
        for n, differences in enumerate(values)
    ]


def all_above(values: list[Contrast], threshold: float, **shared: int) -> Decision | None:
    return every([above(one, threshold) for one in values])(**shared)


def any_above(values: list[Contrast], threshold: float) -> Decision | None:
    return some([above(one, threshold) for one in values])()


def all_within(values: list[Contrast], margin: float, fewest: int = 3) -> Decision | None:
    return every([equal(one, margin, fewest=fewest) for one in values])()


def decided(decision: Decision | None) -> str:
    return decision.answer


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=8, unique=True), st.floats(0.05, 2))
def test_one_difference_agrees_with_scipy_and_statsmodels(values, edge):
    sample = np.array(values)
    if np.ptp(sample) < 1e-6:
        return
    p_above = float(stats.ttest_1samp(sample, edge, alternative="greater").pvalue)
    p_below = float(stats.ttest_1samp(sample, edge, alternative="less").pvalue)
    expected = "not identified"
    if p_above < 0.025:
        expected = "supported"
    elif p_below < 0.025:
        expected = "contradicted"
    if min(abs(p_above - 0.025), abs(p_below - 0.025)) > 1e-9:
        assert decided(all_above(contrasts(values), edge)) == expected
        assert decided(any_above(contrasts(values), edge)) == expected
    p_tost = DescrStatsW(sample).ttost_mean(-edge, edge)[0]
    if abs(p_tost - 0.05) > 1e-9:
        is_within = decided(all_within(contrasts(values), edge)) == "supported"
        assert is_within == (p_tost < 0.05)


@given(NUMBERS, st.floats(0.01, 2), st.floats(0.01, 2))
def test_a_wider_margin_never_takes_support_away(values, margin, more):
    narrow = decided(all_within(contrasts(*values), margin))
    wide = decided(all_within(contrasts(*values), margin + more))
    assert narrow != "supported" or wide == "supported"
    assert wide != "contradicted" or narrow == "contradicted"


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0]])
def test_below_three_pairs_nothing_is_decided_but_equivalence_on_request(
    values,
):
    assert all_above(contrasts(values), 0) is None
    assert all_within(contrasts(values), 9) is None
    assert any_above(contrasts(values), 0) is None
    assert some([every([above(one, 0) for one in contrasts(values)])])() is None
    equivalence = all_within(contrasts(values), 9, fewest=EQUIVALENCE_FEWEST)
    assert equivalence is None if len(values) < 2 else decided(equivalence) == "supported"


def test_differences_without_spread_are_settled():
    assert decided(all_within(contrasts([0.0, 0.0, 0.0]), 1e-9)) == "supported"
    assert decided(all_above(contrasts([0.1, 0.1, 0.1]), 0)) == "supported"


def test_bounds_support_but_never_contradict():
    bounded = [Contrast("c", np.array([-1.0, -1.1, -0.9]), ("r",), bounds_below=True)]
    assert decided(any_above(bounded, 0)) == "not identified"
    assert decided(any_above(bounded, -3)) == "supported"


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 10])
@pytest.mark.parametrize("count", [1, 4])
def test_wrong_verdicts_stay_below_five_percent(n, count):
    """At the edge of each rule: 1000 sweeps, one comparison there and the others well inside."""
    rng = np.random.default_rng(7)
    wrong = {"above": 0, "within": 0, "any": 0, "not above": 0}
    for _ in range(1000):
        edge, inside = rng.normal(1, 0.2, n), rng.normal(0, 0.2, (count - 1, n))
        at_edge = contrasts(edge.tolist(), *(inside + 3).tolist())
        wrong["above"] += decided(all_above(at_edge, 1)) == "supported"
        wrong["not above"] += decided(all_above(at_edge, 1)) == "contradicted"
        at_margin = contrasts(edge.tolist(), *inside.tolist())
        wrong["within"] += decided(all_within(at_margin, 1)) == "supported"
        all_at_edge = contrasts(*rng.normal(1, 0.2, (count, n)).tolist())
        wrong["any"] += decided(any_above(all_at_edge, 1)) == "supported"
    # Three standard errors of 5 % over 1000 sweeps are 2.1 %.
    assert max(wrong.values()) < 1000 * 0.071, wrong


def test_what_has_one_pair_is_neither_all_nor_none():
    sure, single = [0.0, 0.001, -0.001], [7.0]
    assert decided(all_within(contrasts(sure), 1.0)) == "supported"
    assert decided(all_within(contrasts(sure, single), 1.0)) == "not identified"
    assert decided(all_above(contrasts(sure, single), -1.0)) == "not identified"
    assert decided(any_above(contrasts(sure, single), 1.0)) == "not identified"
    # What is wrong somewhere is wrong, whatever else is open.
    assert decided(all_within(contrasts([3.0, 3.1, 3.2], single), 1.0)) == "contradicted"


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
@pytest.mark.parametrize("turned", [False, True])
def test_an_infinite_difference_leaves_neither_all_nor_none(turned):
    """Its interval has no ends, wherever it stands among the others."""
    apart, good, bad = [0.0, np.inf, 0.0], [1.0, 1.001, 0.999], [-1.0, -1.001, -0.999]

    def both(other: list[float]) -> list[Contrast]:
        return contrasts(*([other, apart] if turned else [apart, other]))

    assert decided(all_above(both(good), 0)) == "not identified"
    assert decided(all_above(both(bad), 0)) == "contradicted"
    assert decided(any_above(both(good), 0)) == "supported"
    assert decided(any_above(both(bad), 0)) == "not identified"


def test_several_ways_and_places_share_the_level():
    spread = [-0.15, 0.0, 0.0, 0.15]
    above = contrasts([1.25 + x for x in spread])
    assert decided(all_above(above, 1.0)) == "supported"
    assert decided(all_above(above, 1.0, ways=20)) == "not identified"
    below = contrasts([0.75 + x for x in spread])
    assert decided(all_above(below, 1.0)) == "contradicted"
    assert decided(all_above(below, 1.0, places=20)) == "not identified"


@given(NUMBERS, st.floats(-1, 1))
def test_below_is_above_with_the_sign_turned(values, threshold):
    turned = contrasts(*([-x for x in sides] for sides in values))
    one, other = (
        every([test(contrast, sign * threshold) for contrast in sides])()
        for test, sides, sign in ((below, contrasts(*values), 1), (above, turned, -1))
    )
    assert decided(one) == decided(other)
    assert one.deciding.values.tolist() == (-other.deciding.values).tolist()


def test_every_place_needs_some_way_to_hold():
    good, bad, open_ = ([x + off for x in (-0.01, 0.0, 0.01)] for off in (1.0, -1.0, 0.001))

    def asked(*places: list[list[float]]) -> str:
        return decided(
            every([some([above(one, 0) for one in contrasts(*ways)]) for ways in places])()
        )

    assert asked([good, bad], [bad, good]) == "supported"
    assert asked([good, bad], [bad, bad]) == "contradicted"
    assert asked([good, bad], [bad, open_]) == "not identified"


@pytest.mark.slow
def test_the_fastest_of_several_is_not_chosen_on_the_data_that_test_it():
    """Eight cuts alike against one slower by the threshold: choosing the fastest errs in 10 %."""
    rng, threshold, n = np.random.default_rng(7), float(np.log(1.05)), 400
    false = supported = chosen = 0
    for _ in range(n):
        smaller, larger = 0.05 * rng.standard_normal((8, 5)), 0.05 * rng.standard_normal(5)
        differences = larger - smaller + threshold
        false += decided(any_above(contrasts(*differences), threshold)) != "not identified"
        fastest = contrasts(differences[smaller.mean(axis=1).argmin()])
        chosen += decided(any_above(fastest, threshold)) != "not identified"
        slower = contrasts(*(differences + 0.25))
        supported += decided(any_above(slower, threshold)) == "supported"
    assert false / n <= 0.05 < chosen / n
    assert supported / n > 0.9


def test_every_contradicts_at_the_level_over_its_comparisons():
    """A mean between the t-intervals of one comparison and of two, by their closed form."""
    spread = np.array([-1.0, 0.0, 1.0])
    halves = [stats.t.ppf(1 - 0.05 / (2 * count), 2) / 3**0.5 for count in (1, 2)]
    below = (spread - sum(halves) / 2).tolist()
    far_above = (spread + 100).tolist()
    assert decided(all_above(contrasts(below), 0)) == "contradicted"
    assert decided(all_above(contrasts(below, far_above), 0)) == "not identified"
    above = [-x for x in below]
    assert decided(any_above(contrasts(above), 0)) == "supported"
    assert decided(any_above(contrasts(above, [-x for x in far_above]), 0)) == "not identified"
