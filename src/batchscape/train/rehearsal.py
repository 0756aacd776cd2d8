"""A few steps of a training, to count its memory."""

from __future__ import annotations

from collections.abc import Callable

from batchscape.engines import Engine
from batchscape.measure.clock import CpuClock
from batchscape.record.heartbeat import Phase, beat
from batchscape.record.spec import RunSpec
from batchscape.train.accumulation import accumulate
from batchscape.train.averaging import WeightAverage
from batchscape.train.loader import BatchLoader
from batchscape.train.timeline import Timeline


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
    heaviest = Timeline(spec.stages).heaviest_step()
    for k in range(optimizer_steps):
        labels = accumulate(engine, loader, clock, heaviest, most_micro_steps=2).labels
        phase("first_optimizer_step" if k == 0 else "steady")
        beat(Phase.OPTIMIZER)
        engine.optimizer_step(spec.stages[0].optimizer, 0.0)
        if average is not None:
            average.update(labels)
        phase("steady")
    engine.close()
