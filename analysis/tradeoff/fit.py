"""Fit of the trade-off between optimizer steps and batch size, with intervals.

Means over seeds of log S are fitted by least squares, every batch size with equal weight, whatever
its number of seeds: the form is an approximation, and no part of the curve shall count more because
it was run more often.

A quantity is identified where its interval has two ends (the runs are compatible neither with
perfect scaling, S = b/B, nor with a constant, S = a) and the batch sizes reach both sides of the
critical one. With one seed there is no interval; the two-term form must then be preferred to both
by AICc.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy import stats

from batchscape.analysis.estimates import LEVEL, Estimate
from batchscape.analysis.numbers import significant
from batchscape.analysis.tradeoff.checks import lack_of_fit, residuals
from batchscape.analysis.tradeoff.forms import FORMULAS, Floats, Form, predicted
from batchscape.analysis.tradeoff.intervals import band
from batchscape.analysis.tradeoff.measurements import Measurements, measure
from batchscape.analysis.tradeoff.quantities import (
    Fitted,
    critical_batch_size,
    exponent,
    fit_means,
    largest_batch,
    least_samples,
    least_steps,
    no_estimate,
)
from batchscape.errors import AnalysisError

__all__ = ["TradeoffFit", "fit_tradeoff"]


@dataclass(frozen=True)
class TradeoffFit:
    """Steps to a target as a function of the global batch size, and what follows from it."""

    form: Form
    s_min: Estimate
    """Fewest optimizer steps, at unlimited batch size: a."""
    e_min: Estimate
    """Fewest samples, at batch sizes far below the critical one: b."""
    exponent: Estimate
    """alpha; 1 by definition in the two-term form."""
    critical_batch_size: Estimate
    """Where steps are twice the fewest (`mccandlish`): b/a."""
    overhead_batch_size: Estimate
    """Largest batch size that needs at most a stated fraction of samples more than another one."""
    batches: pd.DataFrame
    """One row a batch size of the fit: `global_batch_size`, `runs`, `steps` (geometric mean over
    seeds), `fitted_steps`, `residual` (of log steps), `residual_error` (its standard error, from
    seeds), `samples`."""
    excluded: pd.DataFrame
    """Batch sizes left out, as `Measurements.excluded`."""
    leave_one_out: pd.DataFrame
    """One row a left-out batch size: the estimates from the others."""
    forms: pd.DataFrame
    """AICc of all forms on the same means, indexed by form."""
    lack_of_fit_p: float
    """Probability of residuals as large as these from seeds alone; NaN for one seed."""
    identified: bool
    """Whether the critical batch size is."""
    why: str | None
    """Why it is not."""
    warnings: tuple[str, ...]
    parameters: tuple[float, float, float]
    """a, critical batch size and alpha of the fitted curve, identified or not; NaN where nothing
    was fitted."""
    n_seeds: int
    runs: pd.DataFrame
    """Rows of the runs behind the fit."""
    fitted: Fitted | None
    """What the estimates were made of; None where nothing was fitted."""

    @property
    def misfit(self) -> str | None:
        """That the form does not fit, with the p-value; None where nothing shows it."""
        return _misfit(self.form, self.lack_of_fit_p)

    @property
    def aicc(self) -> float:
        """AICc of this form."""
        return float(self.forms["aicc"].get(self.form, math.nan))

    def predict(self, batch_sizes: Floats) -> pd.DataFrame:
        """Return the fitted curve with its pointwise interval.

        Parameters
        ----------
        batch_sizes : array, shape (places,)

        Returns
        -------
        DataFrame
            `global_batch_size`, `steps`, `low`, `high`; the ends are missing for one seed.
        """
        sizes = np.asarray(batch_sizes, dtype=np.float64)
        log_steps, reach = np.full(len(sizes), math.nan), np.full(len(sizes), math.nan)
        if self.fitted is not None:
            fit = self.fitted
            log_steps = predicted(np.log(sizes), fit.theta)[0]
            if fit.noise is not None:
                n = _n_parameters(self.form)
                error, degrees = band(fit.data, fit.noise, fit.theta, np.log(sizes), n)
                reach = (stats.t.ppf((1 + fit.level) / 2, degrees) * error)[0]
        logs = {"steps": log_steps, "low": log_steps - reach, "high": log_steps + reach}
        curves = {name: np.exp(values) for name, values in logs.items()}
        return pd.DataFrame({"global_batch_size": sizes, **curves})


def fit_tradeoff(
    reaches: pd.DataFrame,
    *,
    form: Form = "two_term",
    overhead: float = 0.2,
    reference_batch_size: float | None = None,
    level: float = LEVEL,
) -> TradeoffFit:
    """Fit steps to one target against the global batch size.

    Parameters
    ----------
    reaches : DataFrame
        One row a run of one group and target, at one learning rate a batch size:
        `global_batch_size` (samples), `seed`, `steps_to_target` (missing or infinite: not reached).
    form : str
        "two_term", S = a + b/B, or "free_exponent", S = a + b/B^alpha.
    overhead : float
        Fraction of samples above those at the reference that is accepted.
    reference_batch_size : float, optional
        In samples; the smallest one of the fit if not given.
    level : float
        Coverage of intervals.

    Returns
    -------
    TradeoffFit

    Raises
    ------
    AnalysisError
        If the table, form, overhead, reference or level is not usable.

    Notes
    -----
    Sources: McCandlish et al. 2018, arXiv:1812.06162, section 2.3; Zhang et al. 2024,
    arXiv:2410.21676, for the overhead (there 20 % above batch size 256).
    """
    _check_settings(form, overhead, reference_batch_size, level)
    found = measure(reaches)
    reference = reference_batch_size or (found.batches.min() if len(found.batches) else math.nan)
    fit = fit_means(found, form, level)
    if isinstance(fit, str):
        return _nothing_fitted(found, form, fit)
    critical = critical_batch_size(fit)
    parameters = _n_parameters(form)
    p = lack_of_fit(fit.data, fit.theta, found, parameters)
    a, c, q = fit.theta[0]
    misfit = _misfit(form, p)
    return TradeoffFit(
        form=form,
        s_min=_noted(least_steps(fit), misfit),
        e_min=_noted(least_samples(fit), misfit),
        exponent=_noted(exponent(fit), misfit),
        critical_batch_size=_noted(critical, misfit),
        overhead_batch_size=_noted(largest_batch(fit, overhead, reference), misfit),
        batches=residuals(fit.data, fit.theta, found, fit.noise, parameters),
        excluded=found.excluded,
        leave_one_out=fit.leave_one_out,
        forms=fit.forms,
        lack_of_fit_p=p,
        identified=critical.is_identified,
        why=None if critical.is_identified else critical.note,
        warnings=(*found.warnings, *_doubts(fit, p)),
        parameters=(math.exp(a), math.exp(c), math.exp(q)),
        n_seeds=found.n_seeds,
        runs=found.used,
        fitted=fit,
    )


def _nothing_fitted(found: Measurements, form: Form, why: str) -> TradeoffFit:
    unit = {"s_min": "optimizer steps", "exponent": ""}
    none = {
        name: no_estimate(found, why, unit.get(name, "samples"), f"{name} of {FORMULAS[form]}")
        for name in ("s_min", "e_min", "exponent", "critical_batch_size", "overhead_batch_size")
    }
    steps = np.exp(np.nanmean(found.log_steps, axis=1)) if len(found.batches) else found.batches
    batches = pd.DataFrame({"global_batch_size": found.batches, "runs": found.counts})
    missing = dict.fromkeys(("fitted_steps", "residual", "residual_error"), math.nan)
    return TradeoffFit(
        form=form,
        **none,
        batches=batches.assign(steps=steps, **missing, samples=steps * found.batches),
        excluded=found.excluded,
        leave_one_out=pd.DataFrame(),
        forms=pd.DataFrame({"aicc": pd.Series(dtype="float64")}),
        lack_of_fit_p=math.nan,
        identified=False,
        why=none["critical_batch_size"].note,
        warnings=found.warnings,
        parameters=(math.nan, math.nan, math.nan),
        n_seeds=found.n_seeds,
        runs=found.used,
        fitted=None,
    )


def _doubts(fit: Fitted, p: float) -> list[str]:
    """Say what weakens a fit as a whole."""
    doubts = []
    if fit.noise is None:
        doubts.append(
            "One seed a batch size: no interval can be given. The range over left-out batch sizes "
            "is no measure of the spread between seeds."
        )
    if p < 1 - LEVEL:
        other = str(fit.forms["aicc"].idxmin())
        hint = f"; AICc prefers {fit.forms['formula'][other]}" if other != fit.form else ""
        doubts.append(
            f"{FORMULAS[fit.form]} does not describe these runs: its residuals are larger than the "
            f"spread between seeds explains (p = {significant(p, 2)}){hint}. The interval holds "
            "for the best curve of this form over these very batch sizes."
        )
    return doubts


def _misfit(form: Form, p: float) -> str | None:
    """Say in short that the form does not fit; None where nothing shows it."""
    if not p < 1 - LEVEL:
        return None
    return f"{FORMULAS[form]} does not fit these runs (p = {significant(p, 2)})"


def _noted(estimate: Estimate, misfit: str | None) -> Estimate:
    if misfit is None or not estimate.is_identified:
        return estimate
    return replace(estimate, note="; ".join(filter(None, (estimate.note, misfit))))


def _n_parameters(form: Form) -> int:
    return 2 if form == "two_term" else 3


def _check_settings(form: str, overhead: float, reference: float | None, level: float) -> None:
    if form not in FORMULAS:
        msg = f"form must be one of {', '.join(FORMULAS)}, got {form!r}"
        raise AnalysisError(msg)
    if not (math.isfinite(overhead) and overhead > 0):
        msg = (
            f"overhead is a fraction above zero, such as 0.2 for 20 % more samples, got {overhead}"
        )
        raise AnalysisError(msg)
    if reference is not None and not (math.isfinite(reference) and reference > 0):
        msg = f"reference_batch_size counts samples and must be above zero, got {reference}"
        raise AnalysisError(msg)
    if not 0 < level < 1:
        msg = f"level is the coverage of intervals, between 0 and 1, got {level}"
        raise AnalysisError(msg)
