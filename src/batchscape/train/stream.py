"""The samples of each optimizer step, for one rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchscape.data.datasets import Dataset
from batchscape.data.order import SampleOrder
from batchscape.geometry import BatchGeometry

__all__ = ["SampleStream", "StepSamples"]

_AHEAD = 4096
"""Positions that are shuffled at once; the cost of a call is then shared by many steps."""


class StepSamples(NamedTuple):
    """Samples of one optimizer step."""

    indices: NDArray[np.int64]
    """Of this rank, shape (gradient_accumulation_steps, micro_batch_size)."""
    targets: int
    """Loss-bearing targets of the whole global batch, known without asking other ranks."""


class SampleStream:
    """Cuts the seeded stream of samples by the geometry.

    Position k*B + a*D*M + r*M + m of the stream is sample m of micro-step a of rank r in
    optimizer step k, so that the set of samples of a step does not depend on the decomposition.

    Parameters
    ----------
    dataset : Dataset
        Counts the targets.
    seed : int
        Of the order.
    geometry : BatchGeometry
    rank : int
        Data-parallel rank.
    """

    def __init__(self, dataset: Dataset, seed: int, geometry: BatchGeometry, rank: int) -> None:
        self._dataset = dataset
        self._order = SampleOrder(dataset.num_samples, seed)
        self._geometry = geometry
        self._rank = rank
        self._first = 0
        self._block: NDArray[np.int64] = np.empty((0, geometry.global_batch_size), dtype=np.int64)

    def step(self, optimizer_step: int) -> StepSamples:
        """Return the samples of an optimizer step (counted from 0); any step, in any order."""
        if not self._first <= optimizer_step < self._first + len(self._block):
            self._shuffle_from(optimizer_step)
        samples = self._block[optimizer_step - self._first]
        geometry = self._geometry
        cut = samples.reshape(
            geometry.gradient_accumulation_steps,
            geometry.data_parallel_size,
            geometry.micro_batch_size,
        )
        return StepSamples(cut[:, self._rank], self._dataset.count_targets(samples))

    def _shuffle_from(self, optimizer_step: int) -> None:
        batch = self._geometry.global_batch_size
        steps = max(1, _AHEAD // batch)
        positions = np.arange(steps * batch, dtype=np.int64) + optimizer_step * batch
        self._block = self._order.indices(positions).reshape(steps, batch)
        self._first = optimizer_step
