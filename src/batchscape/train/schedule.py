"""The learning rate as a function of the samples seen."""

from __future__ import annotations

import math

from batchscape.config import Constant, Cosine, Schedule

__all__ = ["schedule_factor"]


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
        left = (1 + math.cos(math.pi * t)) / 2
    else:
        left = 1 - (t if schedule.shape == "linear" else math.sqrt(t))
    return schedule.final_fraction + (1 - schedule.final_fraction) * left
