"""The search for the largest micro-batch that fits, against every boundary there can be."""

import math

from hypothesis import given
from hypothesis import strategies as st

from batchscape.geometry import enumerate_geometries
from batchscape.probe import TriedMicroBatch, seek_largest


def cuts(global_batch_size):
    return enumerate_geometries(global_batch_size, data_parallel_sizes=[1])


def search(candidates, largest, guess):
    """Search where the candidates up to position `largest` fit."""

    def train(geometry):
        return TriedMicroBatch(geometry, candidates.index(geometry) <= largest)

    return seek_largest(candidates, guess, train)


@given(data=st.data(), batch=st.integers(1, 720))
def test_finds_the_boundary_whatever_is_expected(data, batch):
    candidates = cuts(batch)
    count = len(candidates)
    largest = data.draw(st.integers(-1, count - 1))
    attempts = search(candidates, largest, data.draw(st.none() | st.integers(-1, count - 1)))
    fitting = [candidates.index(attempt.geometry) for attempt in attempts if attempt.fits]
    failing = [candidates.index(attempt.geometry) for attempt in attempts if not attempt.fits]
    # The two neighbours of the boundary were both tried, and nothing twice.
    assert max(fitting, default=-1) == largest
    assert min(failing, default=count) == largest + 1
    assert len({attempt.geometry for attempt in attempts}) == len(attempts)
    assert len(attempts) <= 2 + math.ceil(math.log2(count + 1))


@given(data=st.data(), batch=st.integers(1, 720))
def test_a_right_expectation_takes_two_trainings(data, batch):
    candidates = cuts(batch)
    largest = data.draw(st.integers(-1, len(candidates) - 1))
    assert len(search(candidates, largest, largest)) <= 2
