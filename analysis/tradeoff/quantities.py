"""The quantities of a fitted trade-off as estimates: value, interval, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import optimize

from batchscape.analysis.estimates import FEWEST, LEVEL, NOT_IDENTIFIED, Estimate, t_reach
from batchscape.analysis.numbers import significant
from batchscape.analysis.tradeoff.checks import form_table
from batchscape.analysis.tradeoff.forms import FORMULAS, Data, Floats, Form, fit_form
from batchscape.analysis.tradeoff.intervals import PATHS, influence, intervals
from batchscape.analysis.tradeoff.measurements import Measurements
from batchscape.analysis.tradeoff.noise import Noise, noise_of
from batchscape.text import count_text

LEAST_BATCHES: dict[Form, int] = {"two_term": 3, "free_exponent": 4}
"""Batch sizes that a form is fitted to at least."""


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


@dataclass(frozen=True)
class Fitted:
    """A form fitted to means over seeds, and what its estimates are made of."""

    measurements: Measurements
    form: Form
    data: Data
    noise: Noise | None
    theta: Floats
    """Shape (1, 3)."""
    forms: pd.DataFrame
    ends: dict[str, tuple[float, float]]
    """How far, in logarithms, each quantity may lie below and above; infinite: no end. NaN for
    fewer than three seeds."""

    @property
    def log_critical(self) -> float:
        """Logarithm of the fitted critical batch size, identified or not."""
        return float(self.theta[0, 1])

    @property
    def method(self) -> str:
        """How the intervals were made."""
        if self.noise is None:
            return "least squares on log steps; no interval"
        n = self.measurements.n_seeds
        shared = "seeds" if self.noise.n_parts == 1 else "seeds, not shared by batch sizes"
        return (
            "least squares on log steps; score interval by seed with t quantiles, over "
            f"{n} {shared}"
        )


def means_of(measurements: Measurements) -> Data:
    """Return the means over seeds, as forms are fitted to them."""
    n = len(measurements.batches)
    means = np.nanmean(measurements.log_steps, axis=1)[None] if n else np.empty((1, 0))
    return Data(np.log(measurements.batches), means, np.ones_like(means))


def fit_means(measurements: Measurements, form: Form) -> Fitted | str:
    """Fit a form to the means over seeds, or say why there is no fit."""
    n, least = len(measurements.batches), LEAST_BATCHES[form]
    if n < least:
        return (
            f"{FORMULAS[form]} needs at least {least} batch sizes at which every run reached the "
            f"target, and there {'is' if n == 1 else 'are'} {n}"
        )
    data = means_of(measurements)
    theta, _ = fit_form(data, form)
    noise = noise_of(measurements.log_steps[None]) if measurements.n_seeds >= FEWEST else None
    ends = dict.fromkeys(PATHS[form], (math.nan, math.nan))
    if noise is not None:
        for name, path in PATHS[form].items():
            low, high = intervals(data, noise, theta, path, LEVEL)
            ends[name] = float(low[0]), float(high[0])
    return Fitted(measurements, form, data, noise, theta, form_table(data), ends)


def estimates_of(fit: Fitted) -> dict[str, Estimate]:
    """Return fewest steps and samples, exponent and critical batch size, by name."""
    n, estimates = fit.measurements.n_seeds, dict[str, Estimate]()
    critical = "b/a" if fit.form == "two_term" else "(b/a)^(1/alpha)"
    for name, quantity in _QUANTITIES.items():
        definition = quantity.definition.format(formula=FORMULAS[fit.form], critical=critical)
        if name in fit.ends:
            estimates[name] = _estimate(fit, name, definition)
        elif name == "exponent":
            definition = "alpha, 1 in S = a + b/B by definition"
            estimates[name] = Estimate(1.0, math.nan, math.nan, n, "", "none", definition)
        else:
            why = "with a free exponent samples to target have no least value above zero"
            estimates[name] = Estimate.unknown(why, n, definition, unit=quantity.unit)
    return estimates


def largest_batch(fit: Fitted, overhead: float, reference: float) -> Estimate:
    """Return the largest batch size within an overhead of samples over a reference batch size.

    For the two-term form (1 + overhead) reference + overhead b/a, whose interval is that of b/a
    moved along. With a free exponent the interval is that of its logarithm by linear propagation.
    """
    definition = (
        f"overhead{overhead * 100:g}: largest batch size at which samples to target are at most "
        f"{overhead * 100:g} % above those at batch size {reference:g}, by {FORMULAS[fit.form]}"
    )
    base = (1 + overhead) * reference
    if fit.form == "free_exponent":
        value = _overhead_root(fit.theta[0], reference, 1 + overhead)
        reach = log_reach(fit, lambda t: math.log(_overhead_root(t, reference, 1 + overhead)))
        low, high = value * math.exp(-reach), value * math.exp(reach)
        method = fit.method.replace("score interval", "linear propagation")
    else:
        low, high = (
            base + overhead * math.exp(fit.log_critical + end)
            for end in fit.ends["critical_batch_size"]
        )
        value, method = base + overhead * math.exp(fit.log_critical), fit.method
    estimate = Estimate(value, low, high, fit.measurements.n_seeds, "samples", method, definition)
    reason = _undecided(fit, "critical_batch_size", upper_only=True)
    if reason is None and value > fit.measurements.batches.max() * (1 + 1e-9):
        estimate = replace(estimate, high=math.inf)
        reason = _extrapolated(fit, "it", value, "largest")
    return _with_reason(fit, estimate, reason)


def log_reach(fit: Fitted, quantity: Callable[[Floats], float]) -> float:
    """Return how far the logarithm of a quantity may lie from its estimate.

    Parameters
    ----------
    quantity : callable
        Gives that logarithm for parameters (p, c, log q) of the curve, shape (3,).

    Returns
    -------
    float
        Half of the interval, by linear propagation of the errors of cell means; NaN for fewer
        than three seeds.
    """
    if fit.noise is None:
        return math.nan
    theta, step = fit.theta[0], 1e-5
    # The exponent of the two-term form does not move.
    ways = np.eye(3)[: 2 if fit.form == "two_term" else 3]
    slope = np.array(
        [(quantity(theta + step * w) - quantity(theta - step * w)) / (2 * step) for w in ways]
    )
    variance, degrees = fit.noise.variance(influence(fit.data, fit.theta, slope[None, None])[:, 0])
    return t_reach(math.sqrt(variance[0]), float(degrees[0]))


def _estimate(fit: Fitted, name: str, definition: str) -> Estimate:
    """Estimate one of the quantities."""
    quantity = _QUANTITIES[name]
    log_value = float(fit.theta[0] @ quantity.weights)
    low, high = (math.exp(log_value + end) for end in fit.ends[name])
    reason = _undecided(fit, name)
    critical, sizes = math.exp(fit.log_critical), fit.measurements.batches
    side = "largest" if critical > sizes.max() else "smallest" if critical < sizes.min() else ""
    if side in quantity.beyond:
        lost = quantity.beyond[side]
        low, high = 0.0 if lost == "low" else low, math.inf if lost == "high" else high
        reason = reason or _extrapolated(fit, "the critical batch size", critical, side)
    n = fit.measurements.n_seeds
    estimate = Estimate(math.exp(log_value), low, high, n, quantity.unit, fit.method, definition)
    return _with_reason(fit, estimate, reason)


def _with_reason(fit: Fitted, estimate: Estimate, reason: str | None) -> Estimate:
    """With a reason, drop the value, keep the bounds, and note it; else note too few seeds."""
    if reason is not None:
        return replace(estimate, value=math.nan, note=f"{NOT_IDENTIFIED}: {reason}")
    if fit.noise is None:
        few = count_text(fit.measurements.n_seeds, "seed")
        return replace(estimate, note=f"{few}: no interval")
    return estimate


def _undecided(fit: Fitted, quantity: str, *, upper_only: bool = False) -> str | None:
    """Say why the runs do not bound a quantity."""
    if fit.noise is None:
        return _not_preferred(fit)
    low, high = fit.ends[quantity]
    if math.isfinite(high) and (upper_only or math.isfinite(low)):
        return None
    critical = fit.ends["critical_batch_size"]
    if math.isinf(critical[1]):
        power = -np.polyfit(fit.data.x, fit.data.y[0], 1)[0]
        return (
            "the runs are compatible with a power law that has no fewest steps, "
            f"S = b/B^{power:.2g} (1: perfect scaling): add larger batch sizes"
        )
    if math.isinf(critical[0]):
        return (
            "the runs are compatible with steps that do not depend on the batch size, S = a: add "
            "smaller batch sizes"
        )
    return "its interval has no end: add seeds or batch sizes"


def _not_preferred(fit: Fitted) -> str | None:
    """Say why few seeds do not do, by AICc."""
    criteria = fit.forms["aicc"]
    criterion = float(criteria[fit.form])
    few = count_text(fit.measurements.n_seeds, "seed")
    if not math.isfinite(criterion):
        return (
            f"{few}, and {len(fit.measurements.batches)} batch sizes are too few to prefer "
            f"{FORMULAS[fit.form]} to simpler forms by AICc: add seeds or batch sizes"
        )
    nulls = {name: float(criteria[name]) for name in ("perfect_scaling", "constant")}
    best = min(nulls, key=nulls.__getitem__)
    if criterion >= nulls[best]:
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
