"""The learning rate as a function of the samples seen."""

from __future__ import annotations

import math

from batchscape.config import Constant, Cosine

__all__ = ["learning_rate_at", "midpoint"]


def midpoint(optimizer_step: int, global_batch_size: int) -> float:
    """Return the middle of the samples of an optimizer step (counted from 0).

    The left edge would give large batches a learning rate of the past, and their first step
    none at all during a warm-up.
    """
    return (optimizer_step + 0.5) * global_batch_size


def learning_rate_at(
    schedule: Constant | Cosine, peak: float, samples: float, budget_samples: int
) -> float:
    """Return the learning rate once `samples` samples were seen.

    Parameters
    ----------
    schedule : Constant or Cosine
    peak : float
        Highest learning rate.
    samples : float
        Samples seen; `midpoint` gives them for an optimizer step.
    budget_samples : int
        Samples of the whole run, at which a cosine without `decay_samples` ends.

    Notes
    -----
    Warm-up: peak * samples / warmup_samples. Cosine (Loshchilov and Hutter 2017, eq. 5):
    final + (peak - final) * (1 + cos(pi t)) / 2 with t from 0 to 1 between the end of the warm-up
    and the end of the decay, and final afterwards.
    """
    if samples < schedule.warmup_samples:
        return peak * samples / schedule.warmup_samples
    if isinstance(schedule, Constant):
        return peak
    end = schedule.decay_samples or budget_samples
    final = peak * schedule.final_fraction
    if samples >= end:
        return final
    t = (samples - schedule.warmup_samples) / (end - schedule.warmup_samples)
    return final + (peak - final) * (1 + math.cos(math.pi * t)) / 2
