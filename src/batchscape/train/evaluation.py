"""Loss on the held-out samples, in batches that do not depend on the geometry."""

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

__all__ = ["EvaluationResult", "Evaluator"]


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

    Parameters
    ----------
    spec : RunSpec
    device : torch.device
    rank : int
        Data-parallel rank.
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
        self._batches = batches[rank :: self._world_size]
        self._most_batches = math.ceil(len(batches) / self._world_size)
        self._spare = batches[0]

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
        with torch.no_grad(), autocast(self._device.type, self._precision):
            for indices in self._batches:
                beat(Phase.EVALUATION)
                batch = self._dataset.batch(indices)
                count = self._count(indices, batch[1])
                inputs, labels = to_device(batch, self._device, self._precision)
                loss, right = engine.forward(inputs, labels)
                sums += torch.stack([loss.double(), right.double(), sums.new_full((), count)])
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

    def _keep_up(self, engine: Engine) -> None:
        """Forward as often as the rank with the most batches; what comes out does not count."""
        for _ in range(self._most_batches - len(self._batches)):
            batch = self._dataset.batch(self._spare)
            engine.forward(*to_device(batch, self._device, self._precision))

    def _count(self, indices: NDArray[np.int64], labels: Tensor) -> int:
        """Return the labels of a batch that bear a loss, as the training is told them.

        It divides by what data say of themselves, without looking; here that is looked at.
        """
        said = self._dataset.count_labels(indices)
        real = int((labels != IGNORED).sum()) if self._counts_labels else said
        if said != real:
            msg = (
                f"the loss is divided by count_labels, which must be the number of labels that "
                f"are not {IGNORED}: of held-out samples {indices.tolist()[:8]} and on it says "
                f"{said}, and their batch has {real}"
            )
            raise BatchscapeError(msg)
        return said


def _batches(config: Evaluation, held_out: int) -> list[NDArray[np.int64]]:
    chosen = SampleOrder(held_out, seed=0).indices(np.arange(config.samples, dtype=np.int64))
    return [
        chosen[start : start + config.batch_size]
        for start in range(0, config.samples, config.batch_size)
    ]
