"""Which samples an optimizer step takes, where the global batch may change on the way."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from batchscape.config import Constant, Cosine, Schedule
from batchscape.record.spec import Stage


def schedule_factor(schedule: Schedule, samples: float, budget_samples: int) -> float:
    """Return the learning rate over its peak, once `samples` samples were seen.

    Parameters
    ----------
    schedule : Constant, Cosine or WarmupStableDecay
    samples : float
        Samples seen; for an optimizer step the middle of its own.
    budget_samples : int
        Samples of the whole run, at which a decay ends where nothing else is said.

    Notes
    -----
    Warm-up: samples / warmup_samples. With t from 0 to 1 over the decay, the factor is
    final + (1 - final) f(t), and final afterwards. Cosine: f(t) = (1 + cos(pi t)) / 2, from the end
    of the warm-up (Loshchilov and Hutter 2017, eq. 5). Warm-up-stable-decay: f(t) = 1 - t, or
    1 - sqrt(t) (Haegele et al. 2024, arXiv 2405.18392), over the last `decay_samples` of
    the budget; 1 before.
    """
    if samples < schedule.warmup_samples:
        return samples / schedule.warmup_samples
    if isinstance(schedule, Constant):
        return 1.0
    if isinstance(schedule, Cosine):
        begin, end = schedule.warmup_samples, schedule.decay_samples or budget_samples
    else:
        begin, end = budget_samples - schedule.decay_samples, budget_samples
    t = min(max((samples - begin) / (end - begin), 0.0), 1.0)
    if isinstance(schedule, Cosine):
        remainder = (1 + math.cos(math.pi * t)) / 2
    else:
        remainder = 1 - (t if schedule.shape == "linear" else math.sqrt(t))
    return schedule.final_fraction + (1 - schedule.final_fraction) * remainder


class PlannedStep(NamedTuple):
    """Place of one optimizer step in the stream of samples."""

    stage: Stage
    first_sample: int
    """Position of its first sample."""

    @property
    def samples_after(self) -> int:
        """Samples seen once the step is done."""
        return self.first_sample + self.stage.geometry.global_batch_size

    @property
    def midpoint(self) -> float:
        """Middle of its samples, where schedules are read.

        The left edge would give large batches a learning rate of the past, and their first step
        none at all during a warm-up.
        """
        return self.first_sample + self.stage.geometry.global_batch_size / 2


class Timeline:
    """Optimizer steps of a training, in its stages.

    Step k of a stage with global batch B that begins at sample p and step j takes the positions
    [p + (k - j) B, p + (k - j + 1) B).
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)
        steps = accumulate(stage.optimizer_steps for stage in stages)
        samples = accumulate(stage.samples for stage in stages)
        self._first_steps = [0, *steps]
        self._first_samples = [0, *samples]

    def step(self, k: int) -> PlannedStep:
        """Return the place of optimizer step k, counted from 0."""
        index = min(bisect_right(self._first_steps, k) - 1, len(self.stages) - 1)
        stage = self.stages[index]
        ahead = (k - self._first_steps[index]) * stage.geometry.global_batch_size
        return PlannedStep(stage, self._first_samples[index] + ahead)

    def heaviest_step(self) -> int:
        """Return the first step of the stage that holds the most memory.

        Stages differ in their micro-batch or in their accumulation, of which two micro-steps hold
        as much as more do.
        """
        geometries = [stage.geometry for stage in self.stages]
        sizes = [(g.micro_batch_size, min(g.gradient_accumulation_steps, 2)) for g in geometries]
        return self._first_steps[sizes.index(max(sizes))]

    def samples_before(self, k: int) -> int:
        """Return the samples seen before optimizer step k."""
        return self.step(k).first_sample
