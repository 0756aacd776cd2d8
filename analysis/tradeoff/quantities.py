"""The quantities of a fitted trade-off as estimates: value, interval, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import optimize

from batchscape.analysis.estimates import NOT_IDENTIFIED, Estimate, t_reach
from batchscape.analysis.numbers import significant
from batchscape.analysis.tradeoff.fitted import N_PARAMETERS, Fitted
from batchscape.analysis.tradeoff.forms import FORMULAS, Floats
from batchscape.analysis.tradeoff.intervals import PATHS, influence
from batchscape.text import count_text


class _Quantity(NamedTuple):
    """A quantity of the fitted curve."""

    definition: str
    unit: str
    weights: tuple[int, int, int]
    """Of the parameters, in the sum that is its logarithm."""
    beyond: dict[str, str]
    """By side, `largest` or `smallest`, on which the fitted critical batch size may lie outside the
    batch sizes: the end that is lost with the value, `low` or `high` or neither. The curve is not
    trusted there; an absent side costs nothing."""


_QUANTITIES = {
    "s_min": _Quantity(
        "a of {formula}: fewest optimizer steps to target, at any batch size",
        "optimizer steps",
        (1, 0, 0),
        {"largest": "low"},
    ),
    "e_min": _Quantity(
        "b of S = a + b/B: fewest samples to target, far below the critical batch size",
        "samples",
        (1, 1, 0),
        {"smallest": "low"},
    ),
    "exponent": _Quantity("alpha of {formula}", "", (0, 0, 1), {"largest": "", "smallest": ""}),
    "critical_batch_size": _Quantity(
        "mccandlish: {critical} of {formula}, where steps to target are twice the fewest",
        "samples",
        (0, 1, 0),
        {"largest": "high", "smallest": "low"},
    ),
}


def estimate_of(fit: Fitted, name: str) -> Estimate:
    """Return fewest steps or samples, exponent or critical batch size, by its name."""
    quantity, n = _QUANTITIES[name], fit.measurements.n_seeds
    if not fit.is_fitted:
        return _unfitted(fit, name, quantity.unit)
    critical = "b/a" if fit.form == "two_term" else "(b/a)^(1/alpha)"
    definition = quantity.definition.format(formula=FORMULAS[fit.form], critical=critical)
    if name not in PATHS[fit.form]:
        if name == "exponent":
            definition = "alpha, 1 in S = a + b/B by definition"
            return Estimate(1.0, math.nan, math.nan, n, "", "none", definition, fit.misfit)
        why = "with a free exponent samples to target have no least value above zero"
        return Estimate.unknown(why, n, definition, unit=quantity.unit)
    log_value = float(fit.theta[0] @ quantity.weights)
    ends = fit.critical_ends if name == "critical_batch_size" else fit.ends(name)
    low, high = (math.exp(log_value + end) for end in ends)
    reason = _undecided(fit, ends)
    critical_size, sizes = fit.parameters[1], fit.measurements.batches
    side = "largest" if critical_size > sizes.max() else ""
    side = "smallest" if critical_size < sizes.min() else side
    if side in quantity.beyond:
        lost = quantity.beyond[side]
        low, high = 0.0 if lost == "low" else low, math.inf if lost == "high" else high
        reason = reason or _extrapolated(fit, "the critical batch size", critical_size, side)
    value = math.exp(log_value)
    estimate = Estimate(value, low, high, n, quantity.unit, _method(fit), definition)
    return _with_reason(fit, estimate, reason)


def largest_batch(fit: Fitted, overhead: float, reference: float) -> Estimate:
    """Return the largest batch size within an overhead of samples over a reference batch size.

    For the two-term form it is (1 + overhead) reference + overhead b/a, and the interval is that of
    b/a, scaled and shifted by the same formula. With a free exponent the interval is that of its
    logarithm by linear propagation.
    """
    if not fit.is_fitted:
        return _unfitted(fit, "overhead_batch_size", "samples")
    definition = (
        f"overhead{overhead * 100:g}: largest batch size at which samples to target are at most "
        f"{overhead * 100:g} % above those at batch size {reference:g}, by {FORMULAS[fit.form]}"
    )
    method = _method(fit)
    if fit.form == "free_exponent":
        value = _overhead_root(fit.theta[0], reference, 1 + overhead)
        log_half_width = _log_reach(
            fit, lambda t: math.log(_overhead_root(t, reference, 1 + overhead))
        )
        low, high = value * math.exp(-log_half_width), value * math.exp(log_half_width)
        method = method.replace("score interval", "linear propagation")
    else:
        log_ratio = float(fit.theta[0, 1])
        low, value, high = (
            (1 + overhead) * reference + overhead * math.exp(log_ratio + log_shift)
            for log_shift in (fit.critical_ends[0], 0.0, fit.critical_ends[1])
        )
    estimate = Estimate(value, low, high, fit.measurements.n_seeds, "samples", method, definition)
    reason = _undecided(fit, fit.critical_ends, upper_only=True)
    if reason is None and value > fit.measurements.batches.max() * (1 + 1e-9):
        estimate = replace(estimate, high=math.inf)
        reason = _extrapolated(fit, "it", value, "largest")
    return _with_reason(fit, estimate, reason)


def _log_reach(fit: Fitted, quantity: Callable[[Floats], float]) -> float:
    """Return how far the logarithm of a quantity of (p, c, log q) may lie from its estimate.

    By linear propagation of the errors of cell means; NaN for fewer than three seeds.
    """
    if fit.noise is None:
        return math.nan
    theta, step = fit.theta[0], 1e-5
    ways = np.eye(3)
    slope = np.array(
        [(quantity(theta + step * w) - quantity(theta - step * w)) / (2 * step) for w in ways]
    )
    variance, degrees = fit.noise.variance(influence(fit.data, fit.theta, slope[None, None])[:, 0])
    return t_reach(math.sqrt(variance[0]), float(degrees[0]))


def _unfitted(fit: Fitted, name: str, unit: str) -> Estimate:
    formula, n = FORMULAS[fit.form], len(fit.measurements.batches)
    why = (
        f"{formula} needs at least {N_PARAMETERS[fit.form] + 1} batch sizes at which every run "
        f"reached the target, and there {'is' if n == 1 else 'are'} {n}"
    )
    return Estimate.unknown(why, fit.measurements.n_seeds, f"{name} of {formula}", unit=unit)


def _method(fit: Fitted) -> str:
    """Say how the intervals were made."""
    if fit.noise is None:
        return "least squares on log steps; no interval"
    shared = "seeds" if fit.noise.n_parts == 1 else "seeds, not shared by batch sizes"
    return (
        "least squares on log steps; score interval by seed with t quantiles, over "
        f"{fit.measurements.n_seeds} {shared}"
    )


def _with_reason(fit: Fitted, estimate: Estimate, reason: str | None) -> Estimate:
    """With a reason, drop the value, keep the bounds, and note it; else note what weakens it."""
    if reason is not None:
        return replace(estimate, value=math.nan, note=f"{NOT_IDENTIFIED}: {reason}")
    return replace(estimate, note="; ".join(filter(None, (few_seeds(fit), fit.misfit))) or None)


def few_seeds(fit: Fitted) -> str:
    """Say that there are too few seeds for intervals; empty where there are not."""
    few = count_text(fit.measurements.n_seeds, "seed")
    return f"{few}: no interval" if fit.noise is None else ""


def _undecided(fit: Fitted, ends: tuple[float, float], *, upper_only: bool = False) -> str | None:
    """Say why the runs do not bound a quantity, given its ends."""
    if fit.noise is None:
        return _not_preferred(fit)
    if math.isfinite(ends[1]) and (upper_only or math.isfinite(ends[0])):
        return None
    low, high = fit.critical_ends
    if math.isinf(high):
        power = -np.polyfit(fit.data.x, fit.data.y[0], 1)[0]
        law = f"S = b/B^{power:.2g} (1: perfect scaling)"
        if power <= 0:
            return (
                f"steps do not fall with the batch size, {law}: tune the learning rate of each "
                "batch size"
            )
        return (
            f"the runs are compatible with a power law that has no fewest steps, {law}: add larger "
            "batch sizes"
        )
    if math.isinf(low):
        return (
            "the runs are compatible with steps that do not depend on the batch size, S = a: add "
            "smaller batch sizes"
        )
    return "its interval has no end: add seeds or batch sizes"


def _not_preferred(fit: Fitted) -> str | None:
    """Say why few seeds do not do, by AICc."""
    criteria = fit.forms["aicc"]
    few = count_text(fit.measurements.n_seeds, "seed")
    if not math.isfinite(criteria[fit.form]):
        return (
            f"{few}, and {len(fit.measurements.batches)} batch sizes are too few to prefer "
            f"{FORMULAS[fit.form]} to simpler forms by AICc: add seeds or batch sizes"
        )
    best = min("perfect_scaling", "constant", key=lambda null: float(criteria[null]))
    if criteria[fit.form] >= criteria[best]:
        side = "larger" if best == "perfect_scaling" else "smaller"
        name = best.replace("_", " ")
        return f"{few}, and AICc prefers {name}: add {side} batch sizes, or seeds"
    return None


def _extrapolated(fit: Fitted, what: str, value: float, side: str) -> str:
    sizes = fit.measurements.batches
    return (
        f"the fit would put {what} at {significant(value, 3)} samples, beyond the {side} batch "
        f"size {sizes.max() if side == 'largest' else sizes.min():g}"
    )


def _overhead_root(theta: Floats, reference: float, factor: float) -> float:
    """Solve samples(B) = factor x samples(reference) for the larger B."""
    critical, q = float(theta[1]), math.exp(theta[2])

    def log_samples(log_size: float) -> float:
        return log_size + float(np.logaddexp(0.0, q * (critical - log_size)))

    start = math.log(reference)
    log_limit = log_samples(start) + math.log(factor)
    # With an exponent above 1 samples fall first; they rise from this batch size on.
    turn = critical + math.log(q - 1) / q if q > 1 else start
    # log samples is never below the log batch size.
    root = optimize.brentq(lambda x: log_samples(x) - log_limit, max(start, turn), log_limit + 1)
    return math.exp(root)
