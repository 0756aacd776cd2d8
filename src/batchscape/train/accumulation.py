"""The micro-steps of one optimizer step, in a training and in the rehearsal of its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from batchscape.engines import Engine
from batchscape.errors import BatchscapeError
from batchscape.measure.clock import CpuClock, StepClock
from batchscape.record.heartbeat import Phase, beat
from batchscape.record.spec import RunSpec
from batchscape.train.averaging import WeightAverage
from batchscape.train.loader import BatchLoader
from batchscape.train.timeline import Timeline


class StepTotals(NamedTuple):
    """Sums over the micro-steps of one optimizer step."""

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
    micro_step_limit: int | None = None,
) -> StepTotals:
    """Do the micro-steps of optimizer step k (from 0); a rehearsal gives a limit of them."""
    is_rehearsal = micro_step_limit is not None
    step_number = 0 if is_rehearsal else k + 1
    begin = time.perf_counter()
    beat(Phase.DATA, step_number)
    step = loader.step(k, sampling=not is_rehearsal)
    clock.add_data(time.perf_counter() - begin)
    if step.labels == 0:
        raise BatchscapeError(
            f"no label in the global batch of optimizer step {k + 1} bears a loss, and the loss "
            "is divided by the number of such labels; leave out samples without them, or use a "
            "larger global batch"
        )
    weight = 1.0 / step.labels
    micro_steps = min(step.micro_steps, micro_step_limit or step.micro_steps)
    device = next(engine.module.parameters()).device
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for micro_step in range(micro_steps):
        begin = time.perf_counter()
        beat(Phase.DATA, step_number, micro_step)
        inputs, labels = next(step.batches)
        clock.add_data(time.perf_counter() - begin)
        beat(Phase.FORWARD)
        is_last = micro_step == micro_steps - 1
        loss_sum += engine.micro_step(inputs, labels, weight, last=is_last)
    return StepTotals(loss_sum, step.labels, micro_steps)


def rehearse(
    spec: RunSpec,
    loader: BatchLoader,
    build: Callable[[], Engine],
    phase: Callable[[str], None],
    optimizer_steps: int,
) -> None:
    """Build everything and train a few steps of the stage that holds most, then forget it all.

    Two micro-steps stand for any higher number: the second meets the gradients of the first,
    the third meets nothing more.
    """
    phase("after_model")
    engine = build()
    clock = CpuClock()
    half_life_tokens = spec.config.evaluation.ema_half_life_tokens
    average = None
    if half_life_tokens is not None:
        average = WeightAverage(engine.module, half_life_tokens)
    phase("first_backward")
    heaviest_step = Timeline(spec.stages).heaviest_step()
    for i in range(optimizer_steps):
        labels = accumulate(engine, loader, clock, heaviest_step, micro_step_limit=2).labels
        phase("first_optimizer_step" if i == 0 else "steady")
        beat(Phase.OPTIMIZER)
        engine.optimizer_step(spec.stages[0].optimizer, 0.0)
        if average is not None:
            average.update(labels)
        phase("steady")
    engine.close()
