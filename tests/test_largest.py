"""The search for the largest micro-batch that fits, against every boundary there can be."""

import math

from hypothesis import given
from hypothesis import strategies as st

from batchscape.probe import seek_largest


def search(count, largest, guess):
    """Search where the candidates up to position `largest` fit; return what was tried too."""
    tried = []

    def fits(position):
        tried.append(position)
        return position <= largest

    return seek_largest(count, guess, fits), tried


@given(data=st.data(), count=st.integers(1, 60))
def test_finds_the_boundary_whatever_is_expected(data, count):
    largest = data.draw(st.integers(-1, count - 1))
    guess = data.draw(st.none() | st.integers(-1, count - 1))
    answer, tried = search(count, largest, guess)
    assert answer == largest
    # The two neighbours of the boundary were both tried, and nothing twice.
    assert {position for position in (largest, largest + 1) if 0 <= position < count} <= {*tried}
    assert len({*tried}) == len(tried)
    assert len(tried) <= 2 + math.ceil(math.log2(count + 1))


@given(data=st.data(), count=st.integers(1, 60))
def test_a_right_expectation_takes_two_trainings(data, count):
    largest = data.draw(st.integers(-1, count - 1))
    assert len(search(count, largest, largest)[1]) <= 2
