"""The global batch beyond which a larger one makes training slower."""

from __future__ import annotations

import math
from typing import Literal

from scipy import stats

from batchscape.analysis.cost.linear import Combination
from batchscape.analysis.cost.step_time import StepTimeModel
from batchscape.analysis.estimates import LEVEL, NOT_IDENTIFIED, Estimate

__all__ = ["Growth", "break_even_batch"]

Growth = Literal["accumulation", "micro"]
"""How the global batch grows at one number of devices."""


def break_even_batch(
    critical: Estimate,
    model: StepTimeModel,
    *,
    devices: int,
    micro_batch_size: int | None = None,
    growth: Growth = "accumulation",
    level: float = LEVEL,
) -> Estimate:
    """Find the global batch of least time to target, and so of least device-hours.

    Parameters
    ----------
    critical : Estimate
        The critical batch b/a of steps S = a + b/B (McCandlish), in samples, with its interval at
        the same level.
    model : StepTimeModel
    devices : int
        Data-parallel size, which stays.
    micro_batch_size : int, optional
        The micro-batch; needed where accumulation grows.
    growth : {"accumulation", "micro"}
        What grows with the global batch: accumulation at this micro-batch, or the micro-batch
        without accumulation.
    level : float
        Coverage of the interval.

    Returns
    -------
    Estimate
        In samples. The number of devices does not change, so the same batch is the cheapest.

    Notes
    -----
    A step takes c0 + c1 B, where c0 is what does not grow with the batch. (a + b/B)(c0 + c1 B) is
    least at B = sqrt((b/a)(c0/c1)). The interval adds the variances of log(b/a) and of log c0 and
    log c1, taken as independent.
    """
    definition = (
        f"global batch of least time to target on {devices} devices, growing by {growth}: "
        "sqrt(critical batch x fixed time of a step / time a sample adds)"
    )
    method = "logarithms of the critical batch and of both times combined, t-interval"

    def unknown(reason: str) -> Estimate:
        note = f"{NOT_IDENTIFIED}: {reason}"
        return Estimate(
            math.nan, math.nan, math.nan, critical.n, "samples", method, definition, note
        )

    if not critical.is_identified:
        return unknown("the critical batch is not identified")
    if devices > 1 and "exchange_s" not in {name for part in model.parts for name in part.terms}:
        return unknown("the exchange between devices was not measured")
    if growth == "accumulation":
        if micro_batch_size is None:
            return unknown("growth by accumulation needs a micro-batch")
        fixed, one = _split(model, devices, micro_batch_size)
        per_sample = _scaled(one, 1 / (devices * micro_batch_size))
    else:
        fixed, per_sample = _intercept(model, devices)
    if not (fixed.value > 0 and per_sample.value > 0):
        return unknown("the cells do not tell what of a step's time grows with the batch")
    value = math.sqrt(critical.value * fixed.value / per_sample.value)
    lows, highs = [_half(critical.value, critical.low)], [_half(critical.high, critical.value)]
    for part in (fixed, per_sample):
        quantile = stats.t.ppf(0.5 + level / 2, part.degrees) if part.degrees > 0 else math.nan
        spread = float(quantile) * math.sqrt(part.variance) / part.value
        lows.append(spread)
        highs.append(spread)
    low, high = (math.sqrt(sum(end**2 for end in ends)) / 2 for ends in (lows, highs))
    return Estimate(
        value,
        value * math.exp(-low),
        value * math.exp(high),
        critical.n,
        "samples",
        method,
        definition,
        "no interval: one of its parts has none" if math.isnan(low + high) else None,
    )


def _half(upper: float, lower: float) -> float:
    if math.isnan(upper) or math.isnan(lower):
        return math.nan
    return math.inf if lower <= 0 or math.isinf(upper) else math.log(upper / lower)


def _split(model: StepTimeModel, devices: int, micro: int) -> tuple[Combination, Combination]:
    """Split a step into what is done once and what each micro-step adds."""
    return _line(model, (devices, micro, 0), (devices, micro, 1))


def _intercept(model: StepTimeModel, devices: int) -> tuple[Combination, Combination]:
    """Split a step without accumulation into what is fixed and what a sample of B adds."""
    fixed, added = _line(model, (devices, 0, 1), (devices, 1, 1))
    return fixed, _scaled(added, 1 / devices)


def _line(
    model: StepTimeModel, start: tuple[int, int, int], end: tuple[int, int, int]
) -> tuple[Combination, Combination]:
    values = []
    for lower, upper in ((None, start), (start, end)):
        total, variance, degrees = 0.0, 0.0, []
        for part in model.parts:
            weights = part.weights(*upper)
            if lower is not None:
                below = part.weights(*lower)
                weights = [w - v for w, v in zip(weights, below, strict=True)]
            if not any(weights):
                continue
            found = part.fit.combine(weights)
            total += found.value
            variance += found.variance
            degrees.append(found.degrees)
        values.append(Combination(total, variance, min(degrees, default=0.0)))
    return values[0], values[1]


def _scaled(found: Combination, factor: float) -> Combination:
    return Combination(found.value * factor, found.variance * factor**2, found.degrees)
