"""One seeded stream: every sample once an epoch, specified to the last bit."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchscape.data.order import SampleOrder
from batchscape.errors import ConfigError

MASK = 2**64 - 1
# Both sides of the boundary between the two constructions, squares and near-squares.
sizes = st.sampled_from([1, 2, 3, 5, 64, 1000, 1023, 1024, 1025, 1088, 1089, 1090, 1500, 2048])
seeds = st.integers(0, MASK)


def mix(word):
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def word(key, number):
    return mix((key + (number + 1) * 0x9E3779B97F4A7C15) & MASK)


def index_by_the_specification(num_samples, seed, position):
    """The module's docstring in Python integers, one position at a time."""
    epoch, slot = divmod(position, num_samples)
    key = word(mix(seed), epoch)
    if num_samples <= 1024:
        return sorted(range(num_samples), key=lambda sample: (word(key, sample), sample))[slot]
    a = math.isqrt(num_samples)
    a += a * a < num_samples
    b = (num_samples + a - 1) // a
    while True:
        high, low = divmod(slot, b)
        for number in range(8):
            if number % 2 == 0:
                high = (high + (mix((word(key, number) + low) & MASK) >> 1)) % a
            else:
                low = (low + (mix((word(key, number) + high) & MASK) >> 1)) % b
        slot = high * b + low
        if slot < num_samples:
            return slot


def test_words_are_those_of_the_reference_code():
    # First outputs for the state 1234567, from https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    assert [word(1234567, number) for number in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@settings(deadline=None)
@given(sizes | st.integers(1, 2**62), seeds, st.integers(0, 2**63 - 1))
def test_indices_follow_the_specification(num_samples, seed, position):
    indices = SampleOrder(num_samples, seed).indices(np.array([position]))
    assert indices.tolist() == [index_by_the_specification(num_samples, seed, position)]


@settings(deadline=None)
@given(sizes, seeds, st.integers(0, 2**40))
def test_every_sample_exactly_once_an_epoch(num_samples, seed, epoch):
    positions = np.arange(epoch * num_samples, (epoch + 1) * num_samples)
    indices = SampleOrder(num_samples, seed).indices(positions)
    assert np.array_equal(np.sort(indices), np.arange(num_samples))


@settings(deadline=None)
@given(sizes, seeds, st.lists(st.integers(0, 10_000), min_size=1, max_size=50))
def test_random_access_equals_sequential(num_samples, seed, positions):
    order = SampleOrder(num_samples, seed)
    sequential = order.indices(np.arange(10_001))
    assert np.array_equal(order.indices(np.array(positions)), sequential[positions])
    one_by_one = [order.indices(np.array(position)).item() for position in positions]
    assert one_by_one == sequential[positions].tolist()


def test_shape_is_kept_and_input_is_not_written():
    order = SampleOrder(5000, 1)
    positions = np.arange(4992, 5008).reshape(2, 8)
    indices = order.indices(positions)
    assert indices.shape == (2, 8)
    assert indices.dtype == np.int64
    assert np.array_equal(positions.ravel(), np.arange(4992, 5008))
    assert order.indices(np.empty((0, 3), dtype=np.int64)).shape == (0, 3)
    assert SampleOrder(3, 1).indices(np.empty(0, dtype=np.int64)).shape == (0,)
    assert pickle.loads(pickle.dumps(order)) == order  # noqa: S301 - our own bytes


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "5", 2**62 + 1])
def test_bad_sizes_are_refused(bad):
    with pytest.raises(ConfigError, match="num_samples must be an int from 1 to"):
        SampleOrder(bad, 0)


@pytest.mark.parametrize("bad", [-1, 2**64, 0.0, None, True])
def test_bad_seeds_are_refused(bad):
    with pytest.raises(ConfigError, match="seed must be an int from 0 to"):
        SampleOrder(5, bad)


@pytest.mark.parametrize("bad", [[-1, 0], [0.0], [True], np.array([1], dtype=np.uint64), []])
def test_bad_positions_are_refused(bad):
    with pytest.raises(ConfigError, match="positions must be"):
        SampleOrder(5, 0).indices(np.asarray(bad))
