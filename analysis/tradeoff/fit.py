"""Fit of the trade-off between optimizer steps and batch size, with intervals.

Means over seeds of log S are fitted by least squares, every batch size with equal weight, whatever
its number of seeds: the form is an approximation, and no part of the curve shall count more because
it was run more often.

A quantity is identified where its interval has two ends (the runs are compatible neither with
perfect scaling, S = b/B, nor with a constant, S = a) and the batch sizes reach both sides of the
critical one. With fewer than three seeds there is no interval; the form must then be preferred to
both by AICc.

Both forms are fitted. The one with a free exponent is trusted wherever it can be, from four batch
sizes on, and the two-term form, S = a + b/B, stands beside it as what holds if the exponent is 1.

Notes
-----
The rule was chosen by coverage of the critical batch size at 95 %: 200 sweeps in each of 9 cases an
exponent and number of batch sizes (scatter of 2, 5 and 10 %, half of it shared by a seed; 3, 5 and
10 seeds; critical at 100 among batch sizes of 8 to 512, 648 or 1024), lowest to highest case. "By
its exponent" takes the two-term form where the exponent's interval holds 1, else the other; "within
10 %" where that interval lies between 0.9 and 1.1.

======== =========== ================ ================ ================ ================
exponent batch sizes two-term form    free exponent    by its exponent  within 10 %
======== =========== ================ ================ ================ ================
1        4           92 to 98 %       93 to 96 %       90 to 96 %       94 to 98 %
1        5           94 to 98 %       94 to 98 %       91 to 96 %       92 to 98 %
1        8           93 to 98 %       93 to 96 %       90 to 97 %       92 to 98 %
0.95     4           0 to 74 %        93 to 96 %       34 to 96 %       0 to 92 %
0.95     5           0 to 75 %        92 to 96 %       43 to 94 %       0 to 94 %
0.95     8           0 to 66 %        92 to 96 %       36 to 94 %       0 to 90 %
0.9      4           0 to 39 %        92 to 98 %       39 to 98 %       90 to 96 %
0.9      5           0 to 30 %        90 to 96 %       40 to 96 %       90 to 95 %
0.9      8           0 to 18 %        91 to 98 %       38 to 98 %       90 to 98 %
0.85     4           0 to 6 %         92 to 98 %       30 to 98 %       92 to 98 %
0.85     5           0 to 6 %         92 to 98 %       38 to 98 %       92 to 98 %
0.85     8           0 to 2 %         93 to 97 %       46 to 96 %       93 to 97 %
1.1      4           0 to 34 %        92 to 95 %       49 to 95 %       91 to 95 %
1.1      5           0 to 24 %        92 to 96 %       41 to 96 %       90 to 95 %
1.1      8           0 to 24 %        92 to 96 %       52 to 96 %       91 to 96 %
======== =========== ================ ================ ================ ================

No rule that looks at the exponent of the same runs first keeps its coverage: where they hardly tell
0.95 from 1, the two-term form is off by more than its interval is wide. What the free exponent
costs where it is 1: the logarithm of high over low is 1.9 to 2.7 times as long as that of the
two-term form (2.5 with four batch sizes, 2.3 with eight), as if there were a fifth of the seeds.
With an exponent of 0.9 the two-term form gives 72 to 76 instead of 100, with 0.85 61 to 65, with
1.1 130 to 139. `form="two_term"` asks for it, where the exponent is known.
With one seed the free exponent has the smaller worst error too: over the same exponents and scatter
of 5 % the root mean square error of the logarithm is at most 0.21 with six batch sizes, and 0.44
for the two-term form. `tests/analysis/tradeoff/test_trust.py` repeats a part of this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import FEWEST, LEVEL, Estimate, t_reach
from batchscape.analysis.numbers import significant
from batchscape.analysis.tradeoff.checks import lack_of_fit, residuals
from batchscape.analysis.tradeoff.forms import FORMULAS, Floats, Form, predicted
from batchscape.analysis.tradeoff.intervals import band
from batchscape.analysis.tradeoff.measurements import Measurements, measure
from batchscape.analysis.tradeoff.quantities import (
    LEAST_BATCHES,
    Fitted,
    estimates_of,
    fit_means,
    largest_batch,
    means_of,
)
from batchscape.errors import AnalysisError
from batchscape.text import count_text


@dataclass(frozen=True)
class TradeoffFit:
    """Steps to a target as a function of the global batch size, and what follows from it."""

    form: Form
    """The trusted form, or the one that the caller chose."""
    s_min: Estimate
    """Fewest optimizer steps, at unlimited batch size: a."""
    e_min: Estimate
    """Fewest samples, at batch sizes far below the critical one: b."""
    exponent: Estimate
    """alpha; 1 by definition in the two-term form."""
    critical_batch_size: Estimate
    """Where steps are twice the fewest (`mccandlish`): (b/a)^(1/alpha)."""
    overhead_batch_size: Estimate
    """Largest batch size that needs at most a stated fraction of samples more than another one."""
    batches: pd.DataFrame
    """One row a batch size of the fit: `global_batch_size`, `runs`, `steps` (geometric mean over
    seeds), `fitted_steps`, `residual` (of log steps), `residual_error` (its standard error, from
    seeds), `samples`."""
    excluded: pd.DataFrame
    """Batch sizes left out, as `Measurements.excluded`."""
    warnings: tuple[str, ...]
    n_seeds: int
    runs: pd.DataFrame
    """Rows of the runs behind the fit."""
    fit_other: Callable[[], TradeoffFit] = field(repr=False, compare=False)
    """Fits the other form, on the first call only."""
    forms: pd.DataFrame = field(default_factory=partial(pd.DataFrame, columns=["aicc"]))
    """AICc of all forms on the same means, indexed by form."""
    lack_of_fit_p: float = math.nan
    """Probability of residuals as large as these from seeds alone; NaN for one seed."""
    parameters: tuple[float, ...] = (math.nan, math.nan, math.nan)
    """a, critical batch size and alpha of the fitted curve, identified or not; NaN where nothing
    was fitted."""
    fitted: Fitted | None = None
    """What the estimates were made of; None where nothing was fitted."""

    def of_form(self, form: Form) -> TradeoffFit | None:
        """Return the fit of one form to the same runs; None where there are too few batch sizes."""
        fit = self if self.form == form else self.fit_other()
        return None if fit.fitted is None else fit

    @property
    def trust(self) -> str:
        """Why this form and not the other."""
        return _TRUST[self.form]

    @property
    def is_identified(self) -> bool:
        """Whether the critical batch size is."""
        return self.critical_batch_size.is_identified

    @property
    def why_not(self) -> str | None:
        """Why it is not."""
        return None if self.is_identified else self.critical_batch_size.note

    @property
    def misfit(self) -> str | None:
        """That the form does not fit, with the p-value; None where nothing shows it."""
        return _misfit(self.form, self.lack_of_fit_p)

    @property
    def contradiction(self) -> str | None:
        """Why the runs exclude S = a + b/B; None for the other form, or where nothing does."""
        if self.form != "two_term":
            return None
        free = self.of_form("free_exponent")
        if free is not None and (free.exponent.low > 1 or free.exponent.high < 1):
            return f"the exponent of the batch size is {free.exponent.text()}, not 1"
        return self.misfit

    @property
    def fewest_samples(self) -> Estimate:
        """`e_min`, not identified where the runs exclude its form."""
        why = self.contradiction
        if why is None or not self.e_min.is_identified:
            return self.e_min
        return Estimate.unknown(why, self.n_seeds, self.e_min.definition, unit=self.e_min.unit)

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
            `global_batch_size`, `steps`, `low`, `high`; the ends are missing for fewer than three
            seeds.
        """
        sizes = np.asarray(batch_sizes, dtype=np.float64)
        log_steps, reach = np.full(len(sizes), math.nan), np.full(len(sizes), math.nan)
        if self.fitted is not None:
            fit = self.fitted
            log_steps = predicted(np.log(sizes), fit.theta)[0]
            if fit.noise is not None:
                n = _n_parameters(self.form)
                error, degrees = band(fit.data, fit.noise, fit.theta, np.log(sizes), n)
                reach = t_reach(error, degrees)[0]
        logs = {"steps": log_steps, "low": log_steps - reach, "high": log_steps + reach}
        curves = {name: np.exp(values) for name, values in logs.items()}
        return pd.DataFrame({"global_batch_size": sizes, **curves})


def fit_tradeoff(
    reaches: pd.DataFrame,
    *,
    form: Form | None = None,
    overhead: float = 0.2,
    reference_batch_size: float | None = None,
) -> TradeoffFit:
    """Fit steps to one target against the global batch size.

    Parameters
    ----------
    reaches : DataFrame
        One row a run of one group and target, at one learning rate a batch size:
        `global_batch_size` (samples), `seed`, `steps_to_target` (missing or infinite: not reached).
    form : str, optional
        "two_term", S = a + b/B, or "free_exponent", S = a + b/B^alpha. By default the one that is
        trusted: the free exponent, but with three batch sizes the two terms.
    overhead : float
        Fraction of samples above those at the reference that is accepted.
    reference_batch_size : float, optional
        In samples; the smallest one of the fit if not given.

    Returns
    -------
    TradeoffFit
        `of_form` gives that of the other form.

    Raises
    ------
    AnalysisError
        If the table, form, overhead or reference is not usable.

    Notes
    -----
    Sources: McCandlish et al. 2018, arXiv:1812.06162, section 2.3; Zhang et al. 2024,
    arXiv:2410.21676, for the overhead (there 20 % above batch size 256).
    """
    if form is not None and form not in FORMULAS:
        msg = f"form must be one of {', '.join(FORMULAS)}, got {form!r}"
        raise AnalysisError(msg)
    if not 0 < overhead < math.inf:
        msg = (
            f"overhead is a fraction above zero, such as 0.2 for 20 % more samples, got {overhead}"
        )
        raise AnalysisError(msg)
    if reference_batch_size is not None and not 0 < reference_batch_size < math.inf:
        msg = (
            "reference_batch_size counts samples and must be above zero, got "
            f"{reference_batch_size}"
        )
        raise AnalysisError(msg)
    measurements = measure(reaches)
    enough = len(measurements.batches) >= LEAST_BATCHES["free_exponent"]
    chosen: Form = form or ("free_exponent" if enough else "two_term")
    other_form: Form = "two_term" if chosen == "free_exponent" else "free_exponent"
    reference = reference_batch_size or (
        measurements.batches.min() if len(measurements.batches) else math.nan
    )

    @cache
    def own() -> TradeoffFit:
        return _fit(measurements, chosen, other, overhead=overhead, reference=reference)

    @cache
    def other() -> TradeoffFit:
        return _fit(measurements, other_form, own, overhead=overhead, reference=reference)

    fit = own()
    return replace(fit, warnings=(*fit.warnings, *_doubts(fit)))


def _fit(
    measurements: Measurements,
    form: Form,
    other: Callable[[], TradeoffFit],
    *,
    overhead: float,
    reference: float,
) -> TradeoffFit:
    """Fit one form."""
    fit = fit_means(measurements, form)
    fit_of: Callable[..., TradeoffFit] = partial(
        TradeoffFit,
        form=form,
        excluded=measurements.excluded,
        warnings=measurements.warnings,
        n_seeds=measurements.n_seeds,
        runs=measurements.runs,
        fit_other=other,
    )
    n = _n_parameters(form)
    if isinstance(fit, str):
        return fit_of(
            **{
                name: Estimate.unknown(
                    fit, measurements.n_seeds, f"{name} of {FORMULAS[form]}", unit=unit
                )
                for name, unit in _UNITS.items()
            },
            batches=residuals(means_of(measurements), None, measurements, None, n),
        )
    p = lack_of_fit(fit.data, fit.theta, measurements, n)
    misfit = _misfit(form, p)
    estimates = estimates_of(fit)
    estimates["overhead_batch_size"] = largest_batch(fit, overhead, reference)
    return fit_of(
        **{name: _noted(estimate, misfit) for name, estimate in estimates.items()},
        batches=residuals(fit.data, fit.theta, measurements, fit.noise, n),
        forms=fit.forms,
        lack_of_fit_p=p,
        parameters=tuple(map(math.exp, fit.theta[0])),
        fitted=fit,
    )


_UNITS = {
    "s_min": "optimizer steps",
    "e_min": "samples",
    "exponent": "",
    "critical_batch_size": "samples",
    "overhead_batch_size": "samples",
}
_TRUST: dict[Form, str] = {
    "free_exponent": "trusted, for its interval holds whether or not the exponent is 1",
    "two_term": "holds only if the exponent is 1",
}


def _doubts(fit: TradeoffFit) -> list[str]:
    """Say what weakens a fit as a whole."""
    doubts: list[str] = []
    if fit.fitted is None:
        return doubts
    if fit.n_seeds < FEWEST:
        doubts.append(
            f"{count_text(fit.n_seeds, 'seed')} a batch size: an interval needs {FEWEST}."
        )
    if fit.misfit is not None:
        doubts.append(
            f"{FORMULAS[fit.form]} does not describe these runs: its residuals are larger than the "
            f"spread between seeds explains (p = {significant(fit.lack_of_fit_p, 2)}). The "
            "interval holds for the best curve of this form over these very batch sizes."
        )
    if fit.form == "two_term":
        least = LEAST_BATCHES["free_exponent"]
        free = fit.of_form("free_exponent")
        if free is None:
            doubts.append(
                f"S = a + b/B takes the exponent of the batch size for 1, which {least} batch "
                "sizes would test. If it is 0.9 the critical batch size comes out a quarter too "
                "small."
            )
        elif free.exponent.low > 1 or free.exponent.high < 1:
            doubts.append(
                f"The exponent of the batch size is {free.exponent.text()}, not 1 as S = a + b/B "
                "takes it: its critical batch size is off by more than its interval says."
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
