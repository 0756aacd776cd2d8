"""The micro-steps of one optimizer step."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from batchscape.engines import Engine
from batchscape.errors import BatchscapeError
from batchscape.measure.clock import StepClock
from batchscape.record.heartbeat import Phase, beat
from batchscape.train.loader import BatchLoader


class StepTotals(NamedTuple):
    """What the micro-steps of one optimizer step come to."""

    loss_sum: Tensor
    """Of this rank, a scalar."""
    labels: int
    """Of the global batch."""
    micro_steps: int


def accumulate(
    engine: Engine,
    loader: BatchLoader,
    clock: StepClock,
    k: int,
    most_micro_steps: int | None = None,
) -> StepTotals:
    """Do the micro-steps of an optimizer step."""
    began = time.perf_counter()
    number = k + 1 if most_micro_steps is None else 0
    beat(Phase.DATA, number)
    step = loader.step(k, sampling=most_micro_steps is None)
    clock.add_data(time.perf_counter() - began)
    if step.labels == 0:
        msg = (
            f"optimizer step {k + 1} has no label that bears a loss: the loss is divided by "
            "their number in the global batch, which must be above 0; leave out samples "
            "without such labels, or use a larger global batch"
        )
        raise BatchscapeError(msg)
    weight = 1.0 / step.labels
    last = min(step.micro_steps, most_micro_steps or step.micro_steps) - 1
    device = next(engine.module.parameters()).device
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for micro_step in range(last + 1):
        began = time.perf_counter()
        beat(Phase.DATA, number, micro_step)
        inputs, labels = next(step.batches)
        clock.add_data(time.perf_counter() - began)
        beat(Phase.FORWARD)
        loss_sum += engine.micro_step(inputs, labels, weight, last=micro_step == last)
    return StepTotals(loss_sum, step.labels, last + 1)
