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
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from batchscape.config import Evaluation
from batchscape.data.datasets import IGNORED, open_dataset
from batchscape.data.order import SampleOrder
from batchscape.engines import Engine
from batchscape.engines.precision import autocast
from batchscape.errors import BatchscapeError
from batchscape.record.heartbeat import Phase, beat
from batchscape.record.spec import RunSpec
from batchscape.train.averaging import WeightAverage
from batchscape.train.batches import to_device

_COMPILED = 4
"""A micro-batch of a compiled training over a slice. Of GPT-2 124M on an H200 a compiled step took
8.4 GiB where an eager one took 16.1 (docs/gpu.md), and an eager forward has two tables of logits in
float32 and one in the arithmetic of the run at its end."""

_LITTLE = 2**20
"""Numbers at the end of a forward that are little in any case: 4 MiB in float32."""

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
        self._device = device
        self._precision = spec.precision
        self._world_size = spec.geometry.data_parallel_size
        self._classifies = spec.data.task == "class"
        self._counts_labels = spec.data.task != "other"
        self._samples = spec.config.evaluation.samples
        batches = _batches(spec.config.evaluation, self._dataset.num_samples)
        dealt = [batches[first :: self._world_size] for first in range(self._world_size)]
        self._batches = dealt[rank]
        self._samples_dealt = [[len(batch) for batch in dealt_to] for dealt_to in dealt]
        """Of each batch, by rank."""
        self._rank = rank
        self._spare = batches[0]
        largest = max(stage.geometry.micro_batch_size for stage in spec.stages)
        compiles = spec.config.in_process.compile
        least = max(1, largest // _COMPILED) if compiles else largest
        self._slice = max(
            least, _LITTLE // numbers if (numbers := _numbers_per_sample(spec)) else 0
        )
        self._may_slice: bool | None = None
        """None: not known yet."""

    def evaluate(self, engine: Engine, average: WeightAverage | None) -> EvaluationResult:
        """Evaluate the average of the weights where there is one, and the weights as well."""
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
            with autocast(self._device.type, self._precision):
                for indices in self._batches:
                    batch = self._dataset.batch(indices)
                    sums[2] += self._count_labels(indices, batch[1])
                    size = self._slice if self._may_slice else len(indices)
                    for part in zip(*(tensor.split(size) for tensor in batch), strict=True):
                        on_device = to_device(part, self._device, self._precision)
                        beat(Phase.EVALUATION)
                        loss, right = engine.forward(*on_device)
                        sums[:2] += torch.stack([loss.double(), right.double()])
                if not engine.state_is_whole:
                    self._keep_up(engine)
        engine.module.train()
        if self._world_size > 1:
            dist.all_reduce(sums)
        loss_sum, right_sum, labels_sum = sums.tolist()
        if labels_sum == 0:
            msg = (
                "the evaluation has no label that bears a loss: its loss is divided by their "
                "number in the held-out samples, which must be above 0; hold out other samples, "
                f"or raise evaluation.samples={self._samples}"
            )
            raise BatchscapeError(msg)
        return EvaluationResult(
            eval_loss=loss_sum / labels_sum,
            raw_eval_loss=None,
            eval_accuracy=right_sum / labels_sum if self._classifies else None,
            eval_labels=int(labels_sum),
        )

    def _is_additive(self, engine: Engine) -> bool:
        """Whether the loss of a batch is the sum over its parts; on all ranks together.

        Every rank looks at the same two samples, in the precision of the parameters.
        """
        if self._slice >= len(self._spare):
            return True
        beat(Phase.EVALUATION)
        pair = to_device(self._dataset.batch(self._spare[:2]), self._device, self._precision)
        parts = zip(*(tensor.split(1) for tensor in pair), strict=True)
        of_both, one_by_one = (
            sum(float(engine.forward(*part)[0]) for part in parts_of)
            for parts_of in ([pair], parts)
        )
        # One that is not finite ends the training in any case.
        differs = torch.tensor(float(abs(of_both - one_by_one) > _TOLERANCE * abs(of_both)))
        if self._world_size > 1:
            differs = differs.to(self._device)
            dist.all_reduce(differs, dist.ReduceOp.MAX)
        return not differs.item()

    def _keep_up(self, engine: Engine) -> None:
        """Do as many forwards as the rank with most of them; their results do not count."""
        size = self._slice if self._may_slice else len(self._spare)
        forwards = [
            sum(math.ceil(count / size) for count in counts) for counts in self._samples_dealt
        ]
        batch = self._dataset.batch(self._spare)
        spare = to_device((batch[0][:size], batch[1][:size]), self._device, self._precision)
        for _ in range(max(forwards) - forwards[self._rank]):
            beat(Phase.EVALUATION)
            engine.forward(*spare)

    def _count_labels(self, indices: NDArray[np.int64], labels: Tensor) -> int:
        """Return the labels of a batch that bear a loss; refuse data that count them wrongly."""
        declared = self._dataset.count_labels(indices)
        counted = int((labels != IGNORED).sum()) if self._counts_labels else declared
        if declared != counted:
            msg = (
                f"the loss is divided by count_labels, which must be the number of labels that "
                f"are not {IGNORED}: of held-out samples {indices.tolist()[:8]} and on it says "
                f"{declared}, and their batch has {counted}"
            )
            raise BatchscapeError(msg)
        return declared


def _numbers_per_sample(spec: RunSpec) -> int:
    """Return how many numbers a forward ends with for a sample; 0 where the data do not say."""
    data = spec.data
    if data.features is not None:
        return data.features + data.classes
    return (spec.config.sequence_length or 0) * max(data.classes, data.vocabulary or 0)


def _batches(config: Evaluation, held_out: int) -> list[NDArray[np.int64]]:
    chosen = SampleOrder(held_out, seed=0).indices(np.arange(config.samples, dtype=np.int64))
    return [
        chosen[start : start + config.batch_size]
        for start in range(0, config.samples, config.batch_size)
    ]
