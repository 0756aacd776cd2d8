"""A run that is trained as far as a prefix, and how long that is.

Of runs that train alike one is trained in full; of the others its curve holds too, once their own
first losses were seen to differ by rounding alone (`record.prefix_match`). Such a run completes
with the stop reason `prefix`. What is left of it is its memory, its step time and the losses of
its prefix.
"""

from __future__ import annotations

from batchscape.config import Command
from batchscape.record.spec import RunSpec

__all__ = ["LEAST_STEPS", "MEASURED_STEPS", "prefix_steps"]

MEASURED_STEPS = 15
"""Measured optimizer steps of a prefix: the fewest whose median has a 95 % interval, by order
statistics, that lies within their quartiles (the 4th to the 12th of 15). Source: David, Nagaraja,
Order Statistics, 2003, section 7.1."""
LEAST_STEPS = 20
"""Optimizer steps of a prefix at least: in 20 a cut that trains otherwise was off by 1e-3 nats or
more, and rounding in float32 by 3e-6 (`gpt_nano`, AdamW, four cuts of a global batch of 32)."""


def prefix_steps(spec: RunSpec) -> int | None:
    """Return how many optimizer steps a prefix of a run has; None where it is trained in full.

    A prefix has its warm-up and `MEASURED_STEPS` that are neither that nor sampled for the noise of
    the gradient; at least `LEAST_STEPS`. Evaluations that fall into it are made, the one before the
    first optimizer step among them. Trained in full is what is not asked to be shorter
    (`launcher.one_curve`), has no more steps, has a ramp, whose last stage a prefix does not reach,
    or is a program of others.

    Parameters
    ----------
    spec : RunSpec
    """
    config = spec.config
    if not config.launcher.one_curve or isinstance(config.engine, Command) or len(spec.stages) > 1:
        return None
    every = config.measure.noise_scale_every
    measured, step = 0, config.measure.warmup_optimizer_steps
    while measured < MEASURED_STEPS and step < spec.optimizer_steps:
        # As `measure.noise_scale.is_sampled`, without its torch.
        measured += every is None or (step + 1) % every > 0
        step += 1
    steps = max(step, LEAST_STEPS)
    return steps if steps < spec.optimizer_steps else None
