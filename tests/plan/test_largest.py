"""The search for the largest micro-batch that fits, against every boundary there can be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.geometry import BatchGeometry, enumerate_geometries
from batchscape.plan.largest import Tried, expected_largest, seek_largest


def cuts(global_batch_size: int) -> list[BatchGeometry]:
    return enumerate_geometries(global_batch_size, data_parallel_sizes=[1])


def search(
    candidates: Sequence[BatchGeometry], largest: int, guesses: Sequence[int | None]
) -> list[Tried]:
    """Search where the candidates up to position `largest` fit."""

    def attempt(geometry: BatchGeometry) -> Tried:
        return Tried(geometry, candidates.index(geometry) <= largest)

    def expected(tried: Sequence[Tried]) -> int | None:
        return guesses[min(len(tried), len(guesses) - 1)]

    return seek_largest(candidates, expected, attempt)


@given(data=st.data(), batch=st.integers(1, 720))
def test_finds_the_boundary_whatever_is_expected(data: st.DataObject, batch: int) -> None:
    candidates = cuts(batch)
    count = len(candidates)
    largest = data.draw(st.integers(-1, count - 1))
    guess = st.none() | st.integers(-1, count - 1)
    guesses = data.draw(st.lists(guess, min_size=1, max_size=5))
    tried = search(candidates, largest, guesses)
    fitting = [candidates.index(one.geometry) for one in tried if one.fits]
    others = [candidates.index(one.geometry) for one in tried if not one.fits]
    # The two neighbours of the boundary were both tried, and nothing twice.
    assert max(fitting, default=-1) == largest
    assert min(others, default=count) == largest + 1
    assert len({one.geometry for one in tried}) == len(tried)
    assert len(tried) <= 3 + math.ceil(math.log2(count + 1))


@given(data=st.data(), batch=st.integers(1, 720))
def test_a_right_expectation_takes_two_trainings(data: st.DataObject, batch: int) -> None:
    candidates = cuts(batch)
    largest = data.draw(st.integers(-1, len(candidates) - 1))
    assert len(search(candidates, largest, [largest])) <= 2
    # One that is off by one at first, and learns.
    for off in (-1, 1):
        assert len(search(candidates, largest, [largest + off, largest])) <= 3


@pytest.mark.parametrize(
    ("limit_gib", "fitted", "position"),
    [
        (4.0, [], 1),  # twice the tensors
        (1.9, [], -1),
        (99.0, [], 3),
        (4.0, [(0, 1.0)], 2),  # tensors alone
        (4.0, [(1, 6.0), (0, 1.5)], 0),  # the largest says: three times the tensors
        (6.0, [(0, 1.5), (1, 6.0)], 1),
    ],
)
def test_what_trainings_took_moves_the_expectation(
    limit_gib: float, fitted: list[tuple[int, float]], position: int
) -> None:
    assert expected_largest([1.0, 2.0, 4.0, 8.0], limit_gib, fitted, times=2.0) == position


def test_what_was_too_much_brings_the_expectation_down() -> None:
    predicted = [1.0, 2.0, 4.0, 8.0, 16.0]
    # 8 was out of 4: what is to fit takes less than 8 / 1.3 of it.
    assert expected_largest(predicted, 4.0, [], times=0.5, first_out=3) == 2
    assert expected_largest(predicted, 4.0, [], times=0.5, first_out=1) == 0
    # Once one fits, that one tells.
    assert expected_largest(predicted, 4.0, [(0, 1.0)], times=0.5, first_out=4) == 2
    # What is taken beside is of every one alike.
    assert expected_largest(predicted, 4.0, [], times=1.0, beside_gib=2.5) == 0
    assert expected_largest(predicted, 9.0, [(0, 2.0)], times=9.0, beside_gib=1.0) == 3
