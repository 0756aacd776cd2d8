"""The samples of each optimizer step, for one rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchscape.data.datasets import Dataset
from batchscape.data.order import SampleOrder
from batchscape.geometry import BatchGeometry
from batchscape.measure.noise_scale import is_sampled, small_batch_size
from batchscape.train.timeline import Timeline

_BLOCK_SAMPLES = 4096
"""Positions that are shuffled at once; the cost of a call is then shared by many steps."""


class StepSamples(NamedTuple):
    """Samples of one optimizer step."""

    indices: NDArray[np.int64]
    """Of this rank, shape (gradient_accumulation_steps, micro_batch_size); where a single
    micro-batch is cut for the noise scale, shape (parts, micro_batch_size / parts)."""
    labels: int
    """Loss-bearing labels of the whole global batch, known without asking other ranks."""


class SampleStream:
    """Cuts the seeded stream of samples by the geometry.

    A step of global batch B that begins at position p takes for sample m of micro-step a of rank r
    position p + a*D*M + r*M + m of the stream, so that the set of samples of a step does not depend
    on the decomposition.

    Parameters
    ----------
    dataset : Dataset
        Counts the labels.
    seed : int
        Of the order.
    timeline : Timeline
        Says where each step begins, and its geometry.
    rank : int
        Data-parallel rank.
    noise_scale_every : int or None
        Optimizer steps between two in which a single micro-batch is cut into equal parts, so that
        there are gradients of two sizes; the samples of the step stay the same. Neither the first
        two steps of a run, nor the first of a stage, nor two in succession are cut: whole ones
        tell the memory and the time of a step.
    """

    def __init__(
        self,
        dataset: Dataset,
        seed: int,
        timeline: Timeline,
        rank: int,
        noise_scale_every: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._order = SampleOrder(dataset.num_samples, seed)
        self._timeline = timeline
        self._rank = rank
        self.may_cut = True
        """Whether a micro-batch may be cut: not where the model would train otherwise."""
        self.samples_noise = True
        """Whether noise is sampled at all: not where the engine hides the gradients it needs."""
        self._noise_scale_every = noise_scale_every
        self._block_start = 0
        self._block: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def step(self, optimizer_step: int, *, sampling: bool = True) -> StepSamples:
        """Return the samples of an optimizer step; any step, in any order."""
        planned = self._timeline.step(optimizer_step)
        geometry = planned.stage.geometry
        size = geometry.global_batch_size
        offset = planned.first_sample - self._block_start
        if offset < 0 or offset + size > len(self._block):
            # The block lacks samples of this step: shuffle one that begins with them.
            block_size = max(size, _BLOCK_SAMPLES // size * size)
            positions = np.arange(block_size, dtype=np.int64) + planned.first_sample
            self._block = self._order.indices(positions)
            self._block_start, offset = planned.first_sample, 0
        samples = self._block[offset : offset + size]
        noise_batch_size = self.small_batch_size(optimizer_step) if sampling else None
        micro_batches = samples.reshape(
            -1, geometry.data_parallel_size, noise_batch_size or geometry.micro_batch_size
        )
        return StepSamples(micro_batches[:, self._rank], self._dataset.count_labels(samples))

    def small_batch_size(self, optimizer_step: int) -> int | None:
        """Return the samples behind each gradient that the noise of a step is sampled from.

        None where it is not sampled: it is not the turn of this step (counted from 0), or its only
        micro-batch cannot be cut, or must not be.
        """
        if not self.samples_noise or not is_sampled(optimizer_step, self._noise_scale_every):
            return None
        geometry = self._timeline.step(optimizer_step).stage.geometry
        noise_batch_size = self._small_batch_size(geometry)
        if noise_batch_size != geometry.micro_batch_size:
            stages = [self._timeline.step(k).stage for k in (optimizer_step - 1, optimizer_step)]
            follows_a_cut = self._noise_scale_every == 1 and optimizer_step % 2 == 0
            if optimizer_step < 2 or follows_a_cut or stages[0] is not stages[1]:
                return None
        return noise_batch_size

    def is_cut(self, optimizer_step: int) -> bool:
        """Return whether the only micro-batch of a step (counted from 0) is cut for its noise."""
        noise_batch_size = self.small_batch_size(optimizer_step)
        size = self._timeline.step(optimizer_step).stage.geometry.micro_batch_size
        return noise_batch_size is not None and noise_batch_size < size

    @property
    def micro_batch_sizes(self) -> list[int]:
        """Every number of samples that a micro-step may have."""
        geometries = [stage.geometry for stage in self._timeline.stages]
        sizes = {geometry.micro_batch_size for geometry in geometries}
        if self._noise_scale_every is not None and self.samples_noise:
            sizes |= {size for g in geometries if (size := self._small_batch_size(g)) is not None}
        return sorted(sizes, reverse=True)

    def _small_batch_size(self, geometry: BatchGeometry) -> int | None:
        size = small_batch_size(geometry)
        return size if size == geometry.micro_batch_size or self.may_cut else None
