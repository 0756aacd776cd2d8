"""Loss on the held-out samples, in batches that do not depend on the geometry.

What a forward takes must not decide where the memory of a training ends: a batch passes through the
model in slices no larger than a micro-batch of the training, which holds activations and gradients
as well. The sum of its losses is the same, but for rounding. A compiled training may take a quarter
of what the same model takes as it was written, and that is how it is evaluated: its slices are a
quarter. A slice is never smaller than what is little in any case: small models would spend their
time on many forwards. Where a loss looks at other samples of its batch, the batch is what it is
defined on, and passes as one.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from batchscape.config.data import IGNORED
from batchscape.data.datasets import open_dataset
from batchscape.data.order import SampleOrder
from batchscape.engines import Engine
from batchscape.engines.precision import autocast
from batchscape.errors import BatchscapeError
from batchscape.record.heartbeat import Phase, beat
from batchscape.record.spec import RunSpec
from batchscape.train.averaging import WeightAverage
from batchscape.train.batches import to_device

_COMPILED_MEMORY_FACTOR = 4
"""A micro-batch of a compiled training over a slice. Of GPT-2 124M on an H200 a compiled step took
8.4 GiB where an eager one took 16.1 (docs/gpu.md), and an eager forward has two tables of logits in
float32 and one in the arithmetic of the run at its end."""

_SMALL_OUTPUT = 2**20
"""Numbers that a forward may always put out: 4 MiB in float32."""

_TOLERANCE = 1e-4
"""Largest relative difference between a sum of losses and the sum over its parts that is rounding:
ten times the tolerance in float32 of `models.invariance`."""


class EvaluationResult(NamedTuple):
    """Figures of one evaluation, the same on every rank."""

    eval_loss: float
    """Sum of the losses over all labels / number of labels."""
    raw_eval_loss: float | None
    """The same of the weights themselves, where an average of them was evaluated."""
    eval_accuracy: float | None
    """Share of right classes; None for language models."""
    eval_labels: int
    """Labels that bore a loss."""


class Evaluator:
    """Evaluates the same held-out samples every time; the batches are dealt to the ranks in turn.

    The samples are the first of one fixed permutation, so that they come from all held-out files.
    Losses of a batch are summed by the model, then over batches and ranks in float64. Where ranks
    forward together, those without a last batch forward one that does not count. A compiled
    model is evaluated as it was written: the shapes of an evaluation must not decide what the
    training is compiled to.
    """

    def __init__(self, spec: RunSpec, device: torch.device, rank: int) -> None:
        self._dataset = open_dataset(spec.config, spec.data, "held_out")
        self._spec = spec
        self._device = device
        self._to_device = partial(to_device, device=device, precision=spec.precision)
        samples, size = spec.config.evaluation.samples, spec.config.evaluation.batch_size
        order = SampleOrder(self._dataset.num_samples, seed=0)
        chosen_samples = order.indices(np.arange(samples, dtype=np.int64))
        batches = [chosen_samples[start : start + size] for start in range(0, samples, size)]
        world_size = spec.geometry.data_parallel_size
        self._batches = batches[rank::world_size]
        self._batches_of_first_rank = batches[::world_size]
        """No rank has more: only the last batch may be smaller than the others."""
        # The module's docstring says why slices are no larger, and when they are smaller.
        self._slice_size = max(stage.geometry.micro_batch_size for stage in spec.stages)
        if spec.config.in_process.compile:
            self._slice_size = max(1, self._slice_size // _COMPILED_MEMORY_FACTOR)
        output_numbers = _output_numbers_per_sample(spec)
        if output_numbers:
            self._slice_size = max(self._slice_size, _SMALL_OUTPUT // output_numbers)
        self._may_slice: bool | None = None
        """None until the first evaluation finds it out."""

    def evaluate(self, engine: Engine, average: WeightAverage | None) -> EvaluationResult:
        """Evaluate the weights, and their average where there is one."""
        raw = self._evaluate(engine)
        if average is None:
            return raw
        with average.applied():
            return self._evaluate(engine)._replace(raw_eval_loss=raw.eval_loss)

    def _evaluate(self, engine: Engine) -> EvaluationResult:
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        engine.module.eval()
        with torch.no_grad():
            if self._may_slice is None:
                self._may_slice = self._is_additive(engine)
            with autocast(self._device.type, self._spec.precision):
                for indices in self._batches:
                    batch = self._dataset.batch(indices)
                    sums[2] += self._count_labels(indices, batch[1])
                    size = self._slice_size if self._may_slice else len(indices)
                    for part in zip(*(tensor.split(size) for tensor in batch), strict=True):
                        on_device = self._to_device(part)
                        beat(Phase.EVALUATION)
                        loss, right = engine.forward(*on_device)
                        sums[:2] += torch.stack([loss.double(), right.double()])
                if not engine.state_is_whole:
                    self._match_forwards(engine)
        engine.module.train()
        if self._spec.geometry.data_parallel_size > 1:
            dist.all_reduce(sums)
        loss_sum, right_sum, labels_sum = sums.tolist()
        if labels_sum == 0:
            raise BatchscapeError(
                "no label of the evaluated samples bears a loss, and the loss is divided by the "
                "number of such labels; hold out other samples, or raise "
                f"evaluation.samples={self._spec.config.evaluation.samples}"
            )
        return EvaluationResult(
            eval_loss=loss_sum / labels_sum,
            raw_eval_loss=None,
            eval_accuracy=right_sum / labels_sum if self._spec.data.task == "class" else None,
            eval_labels=int(labels_sum),
        )

    def _is_additive(self, engine: Engine) -> bool:
        """Whether the loss of a batch is the sum over its parts; on all ranks together.

        Every rank looks at the same two samples, in the precision of the parameters.
        """
        first_batch = self._batches_of_first_rank[0]
        if self._slice_size >= len(first_batch):
            return True
        beat(Phase.EVALUATION)
        pair = self._to_device(self._dataset.batch(first_batch[:2]))
        parts = zip(*(tensor.split(1) for tensor in pair), strict=True)
        pair_loss = float(engine.forward(*pair)[0])
        sum_of_losses = sum(float(engine.forward(*part)[0]) for part in parts)
        # A comparison with NaN is false; a loss that is not finite ends the training anyway.
        differs = torch.tensor(float(abs(pair_loss - sum_of_losses) > _TOLERANCE * abs(pair_loss)))
        if self._spec.geometry.data_parallel_size > 1:
            differs = differs.to(self._device)
            dist.all_reduce(differs, dist.ReduceOp.MAX)
        return not differs.item()

    def _match_forwards(self, engine: Engine) -> None:
        """Forward fillers until this rank has done as many forwards as the first one."""
        first_batch = self._batches_of_first_rank[0]
        size = self._slice_size if self._may_slice else len(first_batch)
        forwards, most_forwards = (
            sum(math.ceil(len(indices) / size) for indices in batches)
            for batches in (self._batches, self._batches_of_first_rank)
        )
        inputs, labels = self._dataset.batch(first_batch)
        filler = self._to_device((inputs[:size], labels[:size]))
        for _ in range(most_forwards - forwards):
            beat(Phase.EVALUATION)
            engine.forward(*filler)

    def _count_labels(self, indices: NDArray[np.int64], labels: Tensor) -> int:
        """Return the labels of a batch that bear a loss; refuse data that count them wrongly."""
        declared = self._dataset.count_labels(indices)
        is_other = self._spec.data.task == "other"
        counted = declared if is_other else int((labels != IGNORED).sum())
        if declared != counted:
            raise BatchscapeError(
                f"count_labels returned {declared} for held-out samples {indices.tolist()[:8]} "
                f"and on, and their batch has {counted} labels that are not {IGNORED}; the loss is "
                f"divided by this number: return {counted}"
            )
        return declared


def _output_numbers_per_sample(spec: RunSpec) -> int:
    """Return how many numbers a model puts out for a sample; 0 where the data do not say."""
    data = spec.data
    if data.features is not None:
        return data.features + data.classes
    return (spec.config.sequence_length or 0) * max(data.classes, data.vocabulary or 0)
