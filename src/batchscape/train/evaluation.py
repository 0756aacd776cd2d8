"""Loss on the held-out samples, in batches that do not depend on the geometry."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from batchscape.config import Evaluation
from batchscape.data.datasets import Dataset
from batchscape.data.order import SampleOrder
from batchscape.engines.precision import autocast
from batchscape.train.batches import to_device

__all__ = ["EvaluationResult", "evaluate"]


class EvaluationResult(NamedTuple):
    """Figures of one evaluation, the same on every rank."""

    eval_loss: float
    """Sum of the losses over all targets / number of targets."""
    eval_accuracy: float | None
    """Share of right classes; None for language models."""
    eval_targets: int
    """Targets that bore a loss."""


def evaluate(
    module: nn.Module,
    dataset: Dataset,
    config: Evaluation,
    precision: str,
    *,
    device: torch.device,
    rank: int,
    world_size: int,
    classifies: bool,
) -> EvaluationResult:
    """Evaluate the same held-out samples every time; the batches are dealt to the ranks in turn.

    The samples are the first of one fixed permutation, so that they come from all held-out files.
    Losses of a batch are summed by the model, then over batches and ranks in float64. A compiled
    model is evaluated as it was written: the shapes of an evaluation must not decide what the
    training is compiled to.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    batches = _batches(config, dataset.num_samples)
    module.eval()
    with (
        torch.no_grad(),
        autocast(device.type, precision),
    ):
        for indices in batches[rank::world_size]:
            inputs, targets = to_device(dataset.batch(indices), device, precision)
            loss, right = module.forward(inputs, targets)
            sums += torch.stack([loss.double(), right.double(), sums.new_zeros(())])
            sums[2] += dataset.count_targets(indices)
    module.train()
    if world_size > 1:
        dist.all_reduce(sums)
    loss_sum, right_sum, count = sums.tolist()
    return EvaluationResult(
        eval_loss=loss_sum / count,
        eval_accuracy=right_sum / count if classifies else None,
        eval_targets=int(count),
    )


def _batches(config: Evaluation, held_out: int) -> list[NDArray[np.int64]]:
    chosen = SampleOrder(held_out, seed=0).indices(np.arange(config.samples, dtype=np.int64))
    return [
        chosen[start : start + config.batch_size]
        for start in range(0, config.samples, config.batch_size)
    ]
