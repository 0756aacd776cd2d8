"""One seeded stream: every sample once an epoch, specified to the last bit."""

from __future__ import annotations

import math
import pickle
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from batchscape.data.order import SampleOrder
from batchscape.errors import ConfigError

MASK = 2**64 - 1
# Both sides of the boundary between the two constructions, squares and near-squares.
sizes = st.sampled_from([1, 2, 3, 5, 64, 1000, 1023, 1024, 1025, 1088, 1089, 1090, 1500, 2048])
seeds = st.integers(0, MASK)


def mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def word(key: int, number: int) -> int:
    return mix((key + (number + 1) * 0x9E3779B97F4A7C15) & MASK)


def index_by_the_specification(num_samples: int, seed: int, position: int) -> int:
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


def epochs_of(num_samples: int, seed: int, count: int) -> NDArray[np.int64]:
    """Shape (count, num_samples)."""
    stream = SampleOrder(num_samples, seed).indices(np.arange(count * num_samples))
    return stream.reshape(count, num_samples)


def test_words_are_those_of_the_reference_code() -> None:
    # First outputs for the state 1234567, from https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    assert [word(1234567, number) for number in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@settings(deadline=None)
@given(sizes | st.integers(1, 2**62), seeds, st.integers(0, 2**63 - 1))
def test_indices_follow_the_specification(num_samples: int, seed: int, position: int) -> None:
    indices = SampleOrder(num_samples, seed).indices(np.array([position]))
    assert indices.tolist() == [index_by_the_specification(num_samples, seed, position)]


@pytest.mark.parametrize(
    ("num_samples", "seed", "start", "expected"),
    [
        (10, 0, 0, [5, 7, 8, 2, 9]),
        (10, 1, 35, [6, 4, 5, 7, 8]),
        (200_000, 0, 0, [41748, 82769, 177395, 83091, 172907]),
        (200_000, 1, 199_996, [195455, 57002, 148386, 37427, 27545]),
        (
            2**40,
            2**64 - 1,
            2**62,
            [196638842317, 794415490535, 524237050618, 500010822190, 684298106198],
        ),
    ],
)
def test_the_stream_never_changes(
    num_samples: int, seed: int, start: int, expected: list[int]
) -> None:
    # Recorded once: a changed number here orphans every result that a user has.
    indices = SampleOrder(num_samples, seed).indices(np.arange(start, start + 5))
    assert indices.tolist() == expected


@settings(deadline=None)
@given(sizes, seeds, st.integers(0, 2**40))
def test_every_sample_exactly_once_an_epoch(num_samples: int, seed: int, epoch: int) -> None:
    positions = np.arange(epoch * num_samples, (epoch + 1) * num_samples)
    indices = SampleOrder(num_samples, seed).indices(positions)
    assert np.array_equal(np.sort(indices), np.arange(num_samples))


def test_large_epochs_are_permutations() -> None:
    for num_samples in (200_000, 447**2, 447**2 - 1, 447**2 + 1):
        indices = SampleOrder(num_samples, 3).indices(np.arange(num_samples))
        assert np.array_equal(np.sort(indices), np.arange(num_samples))


@settings(deadline=None)
@given(sizes, seeds, st.lists(st.integers(0, 10_000), min_size=1, max_size=50))
def test_random_access_equals_sequential(num_samples: int, seed: int, positions: list[int]) -> None:
    order = SampleOrder(num_samples, seed)
    sequential = order.indices(np.arange(10_001))
    assert np.array_equal(order.indices(np.array(positions)), sequential[positions])
    one_by_one = [order.indices(np.array(position)).item() for position in positions]
    assert one_by_one == sequential[positions].tolist()


def test_many_distant_epochs_in_one_request() -> None:
    for num_samples in (1, 3, 900, 5000):
        order = SampleOrder(num_samples, 9)
        positions = np.arange(2000) * 7919 + 2**33
        expected = [order.indices(positions[i : i + 1]).item() for i in range(0, 2000, 50)]
        assert order.indices(positions)[::50].tolist() == expected


def test_shape_is_kept_and_input_is_not_written() -> None:
    order = SampleOrder(5000, 1)
    positions = np.arange(4992, 5008).reshape(2, 8)
    indices = order.indices(positions)
    assert indices.shape == (2, 8)
    assert indices.dtype == np.int64
    assert np.array_equal(positions.ravel(), np.arange(4992, 5008))
    assert order.indices(np.empty((0, 3), dtype=np.int64)).shape == (0, 3)
    assert SampleOrder(3, 1).indices(np.empty(0, dtype=np.int64)).shape == (0,)
    assert pickle.loads(pickle.dumps(order)) == order  # noqa: S301 - our own bytes


@pytest.mark.parametrize("num_samples", [64, 5000])
def test_seeds_and_epochs_differ(num_samples: int) -> None:
    streams = np.concatenate([epochs_of(num_samples, seed, 4) for seed in (0, 1, 2, 2**63)])
    assert len(np.unique(streams, axis=0)) == len(streams)
    for first in range(len(streams)):
        agree = (streams[first] == streams[first + 1 :]).sum(axis=1)
        # Two random permutations agree in 1 place on average; P(12 or more) < 1e-8.
        assert np.all(agree < 12)


@pytest.mark.parametrize("num_samples", [2, 3, 4])
def test_small_permutations_are_equally_likely(num_samples: int) -> None:
    number = {order: i for i, order in enumerate(permutations(range(num_samples)))}
    two_epochs = [epochs_of(num_samples, seed, 2) for seed in range(3000)]
    pairs = np.array([[number[tuple(row)] for row in rows.tolist()] for rows in two_epochs])
    counts = np.zeros((len(number), len(number)))
    np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    # Over seeds: the first epoch, the second, and both together (they are independent).
    for observed in (counts.sum(axis=1), counts.sum(axis=0), counts.ravel()):
        assert stats.chisquare(observed).pvalue > 0.001
    # Over the epochs of one seed.
    rows = epochs_of(num_samples, 5, 12_000).tolist()
    observed = np.bincount([number[tuple(row)] for row in rows], minlength=len(number))
    assert stats.chisquare(observed).pvalue > 0.001


@pytest.mark.parametrize("num_samples", [500, 1025])
def test_permutations_look_random(num_samples: int) -> None:
    streams = epochs_of(num_samples, 11, 600)
    # Fixed points and kept neighbours are both Poisson(1) in random permutations, to O(1/n).
    poisson = stats.poisson(1).pmf(range(5))
    expected = 600 * np.append(poisson, 1 - poisson.sum())
    fixed = (streams == np.arange(num_samples)).sum(axis=1)
    neighbours = (np.diff(streams, axis=1) == 1).sum(axis=1)
    for counts in (fixed, neighbours):
        observed = np.bincount(np.minimum(counts, 5), minlength=6)
        assert stats.chisquare(observed, expected).pvalue > 0.001
    # Every region of the stream reads every region of the data alike, and so do pairs of reads.
    tenth = streams * 10 // num_samples
    place = np.broadcast_to(np.arange(num_samples) * 10 // num_samples, streams.shape)
    share = np.bincount(place[0]) / num_samples
    for before, after in ((place, tenth), (tenth[:, :-1], tenth[:, 1:]), (tenth[:-1], tenth[1:])):
        observed = np.bincount((before * 10 + after).ravel(), minlength=100)
        assert (
            stats.chisquare(observed, np.outer(share, share).ravel() * before.size).pvalue > 0.001
        )


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "5", 2**62 + 1])
def test_bad_sizes_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="num_samples must be an int from 1 to"):
        SampleOrder(bad, 0)


@pytest.mark.parametrize("bad", [-1, 2**64, 0.0, None, True])
def test_bad_seeds_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="seed must be an int from 0 to"):
        SampleOrder(5, bad)


@pytest.mark.parametrize("bad", [[-1, 0], [0.0], [True], np.array([1], dtype=np.uint64), []])
def test_bad_positions_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="positions must be"):
        SampleOrder(5, 0).indices(np.asarray(bad))
