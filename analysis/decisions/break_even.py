"""The global batch beyond which a larger one makes training slower."""

from __future__ import annotations

import math
from typing import Literal

from scipy import optimize
from scipy.special import expit

from batchscape.analysis.cost.linear import Combination
from batchscape.analysis.cost.step_time import StepTimeModel
from batchscape.analysis.estimates import Estimate, t_reach
from batchscape.analysis.tradeoff.fit import TradeoffFit
from batchscape.analysis.tradeoff.forms import FORMULAS, Floats
from batchscape.analysis.tradeoff.quantities import log_reach
from batchscape.text import count_text

Growth = Literal["accumulation", "micro"]
"""How the global batch grows at one number of devices."""

_STEP = 1e-5
"""Of a logarithm, to take a derivative."""
_WIDEST = 10.0
"""A break-even batch that is open by a larger factor is not identified (our choice)."""


def break_even_batch(
    fit: TradeoffFit,
    model: StepTimeModel,
    *,
    devices: int,
    micro_batch_size: int | None = None,
    growth: Growth = "accumulation",
) -> Estimate:
    """Find the global batch of least time to target, and so of least device-hours.

    Parameters
    ----------
    fit : TradeoffFit
        Of steps against the global batch, S = a + b/B^alpha.
    devices : int
        Data-parallel size, which stays.
    micro_batch_size : int, optional
        The micro-batch; needed where accumulation grows.
    growth : {"accumulation", "micro"}
        What grows with the global batch: accumulation at this micro-batch, or the micro-batch
        without accumulation.

    Returns
    -------
    Estimate
        In samples; not identified where an end is more than `_WIDEST` times away. The number of
        devices does not change, so the same batch is the cheapest.

    Notes
    -----
    A step takes c0 + c1 B, where c0 is what does not grow with the batch. The batch at which
    (a + b/B^alpha)(c0 + c1 B) is least is found numerically; with alpha = 1 it is
    sqrt((b/a)(c0/c1)). The interval adds the variance of its logarithm that the fitted a, b and
    alpha leave, together and by linear propagation, and those of log c0 and log c1, taken as
    independent.
    """
    definition = (
        f"global batch of least time to target on {count_text(devices, 'device')}, growing "
        f"by {growth}: where S (c0 + c1 B) is least, by {FORMULAS[fit.form]}, the "
        "fixed time c0 of a step and the time c1 that a sample adds"
    )
    method = "linear propagation from the fit of steps and from both times, t quantiles"

    def unknown(reason: str) -> Estimate:
        return Estimate.unknown(reason, fit.n_seeds, definition, unit="samples", method=method)

    if fit.fitted is None or not fit.identified:
        return unknown("the critical batch is not identified")
    if devices > 1 and "exchange_s" not in {name for part in model.parts for name in part.terms}:
        return unknown("the exchange between devices was not measured")
    if growth == "accumulation":
        if micro_batch_size is None:
            return unknown("growth by accumulation needs a micro-batch")
        # What is done once, and what each micro-step adds.
        fixed, added = _line(model, (devices, micro_batch_size, 0), (devices, micro_batch_size, 1))
        samples = devices * micro_batch_size
    else:
        # What a step without accumulation takes anyway, and what a sample on each device adds.
        fixed, added = _line(model, (devices, 0, 1), (devices, 1, 1))
        samples = devices
    per_sample = Combination(added.value / samples, added.variance / samples**2, added.degrees)
    if not (fixed.value > 0 and per_sample.value > 0):
        return unknown("the cells do not tell what of a step's time grows with the batch")
    ratio = math.log(fixed.value / per_sample.value)
    theta = fit.fitted.theta[0]
    place = _log_cheapest(theta, ratio)
    reaches = [log_reach(fit.fitted, lambda moved: _log_cheapest(moved, ratio))]
    # How far the place moves with the logarithm of c0 over c1.
    slope = (_log_cheapest(theta, ratio + _STEP) - _log_cheapest(theta, ratio - _STEP)) / (
        2 * _STEP
    )
    reaches += [
        slope * t_reach(math.sqrt(part.variance), part.degrees) / part.value
        for part in (fixed, per_sample)
    ]
    reach = math.hypot(*reaches)
    if reach > math.log(_WIDEST):
        return unknown(f"these steps and times leave it open by more than {_WIDEST:g} times")
    return Estimate(
        math.exp(place),
        math.exp(place - reach),
        math.exp(place + reach),
        fit.n_seeds,
        "samples",
        method,
        definition,
        "no interval: one of its parts has none" if math.isnan(reach) else None,
    )


def _log_cheapest(theta: Floats, ratio: float) -> float:
    """Return log B at which steps by the fitted curve times c0 + c1 B are least.

    `theta` is (p, c, log q) of the curve, `ratio` the logarithm of c0 over c1. With alpha = q the
    derivative is zero where B^alpha = alpha (c0/c1) C^alpha / B + (alpha - 1) C^alpha; the left
    side rises and the right one falls with B, so that there is one such place.
    """
    critical, q = float(theta[1]), math.exp(theta[2])
    # From the place for an exponent of 1, on the scale of the critical batch.
    start, room = (ratio - critical) / 2, 1.0

    def slope(x: float) -> float:
        """Derivative of log S plus that of log(c0 + c1 B), at log B = critical + x."""
        return float(expit(x + critical - ratio) - q * expit(-q * x))

    while slope(start - room) > 0 or slope(start + room) < 0:
        room *= 2
    return critical + float(optimize.brentq(slope, start - room, start + room, xtol=1e-12))


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
            combined = part.fit.combine(weights)
            total += combined.value
            variance += combined.variance
            degrees.append(combined.degrees)
        values.append(Combination(total, variance, min(degrees, default=0.0)))
    return values[0], values[1]
