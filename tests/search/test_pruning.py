"""The rule that cuts trials."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from batchscape.search.pruning import is_cut

CURVES = st.lists(
    st.lists(st.floats(0, 10), min_size=8, max_size=8).map(
        lambda losses: dict(zip(range(100, 900, 100), losses, strict=True))
    ),
    max_size=8,
)


def test_a_run_above_the_median_is_cut_where_it_is() -> None:
    others = [{200: 1.0, 400: 0.8}, {200: 1.1, 400: 0.9}, {200: 1.2}, {200: 1.3, 400: 1.0}]
    assert is_cut({200: 1.16}, others, 800) == (200, statistics.median([1.0, 1.1, 1.2, 1.3]))
    assert is_cut({200: 1.15}, others, 800) is None


def test_early_losses_and_few_trials_cut_nothing() -> None:
    others = [{100: 1.0, 400: 0.8}] * 4
    assert is_cut({100: 9.0}, others, 800) is None
    assert is_cut({400: 9.0}, others[:3], 800) is None
    # A trial that was cut before is no longer there to compare with.
    assert is_cut({400: 9.0}, [*others[:3], {100: 5.0}], 800) is None


@given(CURVES)
def test_what_is_cut_is_never_the_best_at_the_place_where_it_is_cut(
    curves: list[dict[int, float]],
) -> None:
    """Compared at equal samples with those before it, and never with less than half of them."""
    for place, curve in enumerate(curves):
        found = is_cut(curve, curves[:place], 800)
        if found is not None:
            samples, median = found
            before = [other[samples] for other in curves[:place]]
            assert curve[samples] > median == statistics.median(before)
            assert 2 * sum(loss < curve[samples] for loss in before) >= len(before)
