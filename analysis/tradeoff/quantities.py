"""The quantities of a fitted trade-off as estimates: value, interval, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

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


def fit_means(measurements: Measurements, form: Form) -> Fitted | str:
    """Fit a form to the means over seeds, or say why there is no fit."""
    n, least = len(measurements.batches), LEAST_BATCHES[form]
    if n < least:
        return (
            f"{FORMULAS[form]} needs at least {least} batch sizes at which every run reached the "
            f"target, and there {'is' if n == 1 else 'are'} {n}"
        )
    means = np.nanmean(measurements.log_steps, axis=1)[None]
    data = Data(np.log(measurements.batches), means, np.ones_like(means))
    theta, _ = fit_form(data, form)
    noise = noise_of(measurements.log_steps[None]) if measurements.n_seeds >= FEWEST else None
    ends = dict.fromkeys(PATHS[form], (math.nan, math.nan))
    if noise is not None:
        for name, path in PATHS[form].items():
            low, high = intervals(data, noise, theta, path, LEVEL)
            ends[name] = float(low[0]), float(high[0])
    return Fitted(
        measurements,
        form,
        data,
        noise,
        theta,
        form_table(data),
        ends,
    )


def critical_batch_size(fit: Fitted) -> Estimate:
    """Return the batch size at which steps are twice the fewest."""
    formula = "b/a" if fit.form == "two_term" else "(b/a)^(1/alpha)"
    definition = (
        f"mccandlish: {formula} of {FORMULAS[fit.form]}, where steps to target are twice the fewest"
    )
    estimate = _estimate(fit, "critical_batch_size", fit.log_critical, "samples", definition)
    beyond = _beyond(fit, smaller=True, larger=True)
    if beyond is None:
        return estimate
    # The model is not trusted beyond the batch sizes: only the bound on their side is kept.
    too_large = fit.log_critical > fit.data.x.max()
    bounded = replace(estimate, high=math.inf) if too_large else replace(estimate, low=0.0)
    return _weakened(bounded, beyond)


def least_steps(fit: Fitted) -> Estimate:
    """Return the fewest optimizer steps."""
    definition = f"a of {FORMULAS[fit.form]}: fewest optimizer steps to target, at any batch size"
    estimate = _estimate(fit, "s_min", float(fit.theta[0, 0]), "optimizer steps", definition)
    beyond = _beyond(fit, larger=True)
    return estimate if beyond is None else _weakened(replace(estimate, low=0.0), beyond)


def least_samples(fit: Fitted) -> Estimate:
    """Return the fewest samples."""
    definition = "b of S = a + b/B: fewest samples to target, far below the critical batch size"
    if fit.form == "free_exponent":
        why = "with a free exponent samples to target have no least value above zero"
        return Estimate.unknown(why, fit.measurements.n_seeds, definition, unit="samples")
    log_value = float(fit.theta[0, 0]) + fit.log_critical
    estimate = _estimate(fit, "e_min", log_value, "samples", definition)
    beyond = _beyond(fit, smaller=True)
    return estimate if beyond is None else _weakened(replace(estimate, low=0.0), beyond)


def exponent(fit: Fitted) -> Estimate:
    """Return the exponent of the batch size."""
    definition = f"alpha of {FORMULAS[fit.form]}"
    if fit.form == "two_term":
        definition = "alpha, 1 in S = a + b/B by definition"
        return Estimate(1.0, math.nan, math.nan, fit.measurements.n_seeds, "", "none", definition)
    estimate = _estimate(fit, "exponent", float(fit.theta[0, 2]), "", definition)
    beyond = _beyond(fit, smaller=True, larger=True)
    return estimate if beyond is None else _weakened(estimate, beyond)


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
    if reason is not None:
        return _weakened(estimate, reason)
    if value > fit.measurements.batches.max() * (1 + 1e-9):
        reason = _extrapolated("it", value, "largest", fit.measurements.batches.max())
        return _weakened(replace(estimate, high=math.inf), reason)
    return _without_interval(fit, estimate)


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
    return t_reach(math.sqrt(variance[0]), degrees[0])


def _estimate(fit: Fitted, quantity: str, log_value: float, unit: str, definition: str) -> Estimate:
    low, high = (math.exp(log_value + end) for end in fit.ends[quantity])
    n = fit.measurements.n_seeds
    estimate = Estimate(math.exp(log_value), low, high, n, unit, fit.method, definition)
    reason = _undecided(fit, quantity)
    if reason is not None:
        return _weakened(estimate, reason)
    return _without_interval(fit, estimate)


def _weakened(estimate: Estimate, reason: str) -> Estimate:
    """Keep the bounds of an estimate, without its value."""
    if not estimate.is_identified:
        return estimate
    return replace(estimate, value=math.nan, note=f"{NOT_IDENTIFIED}: {reason}")


def _undecided(fit: Fitted, quantity: str, *, upper_only: bool = False) -> str | None:
    """Say why the runs do not bound a quantity."""
    if fit.noise is None:
        return _not_preferred(fit)
    low, high = fit.ends[quantity]
    if math.isfinite(high) and (upper_only or math.isfinite(low)):
        return None
    critical = fit.ends["critical_batch_size"]
    if math.isinf(critical[1]):
        return _no_plateau(fit)
    if math.isinf(critical[0]):
        return (
            "the runs are compatible with steps that do not depend on the batch size, S = a: add "
            "smaller batch sizes"
        )
    return "its interval has no end: add seeds or batch sizes"


def _no_plateau(fit: Fitted) -> str:
    """Say that the runs are compatible with a form without a least number of steps."""
    power = -np.polyfit(fit.data.x, fit.data.y[0], 1)[0]
    return (
        f"the runs are compatible with a power law that has no fewest steps, S = b/B^{power:.2g} "
        "(1: perfect scaling): add larger batch sizes"
    )


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


def _beyond(fit: Fitted, *, smaller: bool = False, larger: bool = False) -> str | None:
    """Say that the fitted critical batch size lies on the far side of all batch sizes."""
    value, sizes = math.exp(fit.log_critical), fit.measurements.batches
    if larger and value > sizes.max():
        return _extrapolated("the critical batch size", value, "largest", sizes.max())
    if smaller and value < sizes.min():
        return _extrapolated("the critical batch size", value, "smallest", sizes.min())
    return None


def _extrapolated(what: str, value: float, which: str, size: float) -> str:
    return (
        f"the fit would put {what} at {significant(value, 3)} samples, beyond the {which} batch "
        f"size {size:g}"
    )


def _without_interval(fit: Fitted, estimate: Estimate) -> Estimate:
    """Say why an estimate of few seeds has no interval."""
    if fit.noise is not None:
        return estimate
    return replace(estimate, note=f"{count_text(fit.measurements.n_seeds, 'seed')}: no interval")


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
