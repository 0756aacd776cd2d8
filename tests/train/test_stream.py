"""Law 1: the samples of an optimizer step do not depend on how its global batch is cut."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from batchscape.config import AdamW
from batchscape.data.order import SampleOrder
from batchscape.geometry import BatchGeometry, enumerate_geometries
from batchscape.record.spec import Stage
from batchscape.train.stream import SampleStream
from batchscape.train.timeline import Timeline

ADAMW = AdamW(name="adamw", learning_rate=0.1)


class UnevenSamples:
    """As much of a dataset as a stream asks for: sample i bears i % 7 + 1 labels."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def count_labels(self, indices: NDArray[np.int64]) -> int:
        return sum(index % 7 + 1 for index in indices.ravel().tolist())


def rank_streams(
    num_samples: int, seed: int, geometry: BatchGeometry, *ramp: tuple[int, BatchGeometry]
) -> list[SampleStream]:
    """Return the streams of all ranks; stages of a ramp are (optimizer steps, geometry)."""
    dataset = UnevenSamples(num_samples)
    stages = [Stage(steps * cut.global_batch_size, cut, ADAMW) for steps, cut in ramp]
    timeline = Timeline([*stages, Stage(2**40 * geometry.global_batch_size, geometry, ADAMW)])
    # A stream asks for nothing else of a dataset.
    return [
        SampleStream(dataset, seed, timeline, rank)  # type: ignore[arg-type]  # no batches needed
        for rank in range(geometry.data_parallel_size)
    ]


def in_stream_order(streams: list[SampleStream], optimizer_step: int) -> NDArray[np.int64]:
    """Put the parts of all ranks together: micro-steps, then ranks, then samples."""
    parts = [stream.step(optimizer_step).indices for stream in streams]
    return np.stack(parts, axis=1).ravel()


# Epochs shorter than a batch, of about one, and of many; both constructions of the permutation.
sizes = st.integers(1, 60) | st.sampled_from([1023, 1024, 1025, 3000])
steps = st.integers(0, 50) | st.integers(0, 10**6)


@settings(max_examples=40)
@given(st.integers(1, 48), sizes, st.integers(0, 2**64 - 1), steps, st.sampled_from([1, 2, 3]))
def test_every_decomposition_reads_the_same_samples(
    global_batch_size: int, num_samples: int, seed: int, optimizer_step: int, nodes: int
) -> None:
    positions = np.arange(global_batch_size) + optimizer_step * global_batch_size
    expected = SampleOrder(num_samples, seed).indices(positions)
    labels = sum(index % 7 + 1 for index in expected.tolist())
    for geometry in enumerate_geometries(global_batch_size, nodes=nodes):
        streams = rank_streams(num_samples, seed, geometry)
        assert np.array_equal(in_stream_order(streams, optimizer_step), expected)
        # Every rank knows the labels of all ranks, else the loss would be a mean of means.
        assert {stream.step(optimizer_step).labels for stream in streams} == {labels}


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(1, 4)), max_size=3),
    st.sampled_from([1, 2, 3]),
    sizes,
    st.integers(0, 2**64 - 1),
    st.randoms(use_true_random=False),
)
def test_a_ramp_reads_the_stream_without_gap(
    stages: list[tuple[int, int, int]],
    ranks: int,
    num_samples: int,
    seed: int,
    shuffler: random.Random,
) -> None:
    """Every step takes the next contiguous positions, over ranks and micro-steps, in any order."""
    ramp = [(steps, BatchGeometry(1, ranks, micro, more)) for steps, micro, more in stages]
    ramp = [(steps, cut) for steps, cut in ramp if steps]
    last = BatchGeometry(1, ranks, 5, 2)
    streams = rank_streams(num_samples, seed, last, *ramp)
    sizes = [cut.global_batch_size for steps, cut in ramp for _ in range(steps)]
    sizes += [last.global_batch_size] * 4
    edges = np.cumsum([0, *sizes])
    order = SampleOrder(num_samples, seed)
    visited = list(range(len(sizes)))
    shuffler.shuffle(visited)
    for k in visited:
        expected = order.indices(np.arange(edges[k], edges[k + 1]))
        assert np.array_equal(in_stream_order(streams, k), expected)
        labels = sum(index % 7 + 1 for index in expected.tolist())
        assert {stream.step(k).labels for stream in streams} == {labels}


@given(
    st.lists(st.tuples(st.integers(1, 7), st.sampled_from([4, 8, 9, 11])), max_size=3),
    st.integers(1, 5),
)
def test_whole_steps_stand_before_and_between_those_that_are_cut(
    stages: list[tuple[int, int]], every: int
) -> None:
    """The first of all, of a stage, and one of two in succession; at least one steady step.

    What has no divisor is never cut.
    """
    ramp = [(steps, BatchGeometry(1, 1, micro, 1)) for steps, micro in stages]
    (stream,) = rank_streams(100, 0, BatchGeometry(1, 1, 6, 1), *ramp)
    stream._noise_scale_every = every
    cut = [stream.is_cut(k) for k in range(60)]
    begins = [0, *np.cumsum([steps for steps, _ in stages]).tolist()]
    assert not any(cut[k] for k in (*begins, 1))
    assert not any(one and other for one, other in pairwise(cut))
    assert any(cut)
    prime = [size == 11 for steps, size in stages for _ in range(steps)]
    assert not any(one and other for one, other in zip(cut, prime, strict=False))
    for k, is_cut in enumerate(cut):
        assert (len(stream.step(k).indices) > 1) == is_cut
        assert (stream.small_batch_size(k) is not None) == is_cut
