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
from dataclasses import dataclass, field
from functools import cached_property

import pandas as pd

from batchscape.analysis.estimates import FEWEST, Estimate
from batchscape.analysis.numbers import significant
from batchscape.analysis.tradeoff.fitted import N_PARAMETERS, Fitted, fit_forms
from batchscape.analysis.tradeoff.forms import FORMULAS, Form
from batchscape.analysis.tradeoff.measurements import measure
from batchscape.analysis.tradeoff.quantities import estimate_of, largest_batch
from batchscape.errors import AnalysisError
from batchscape.text import count_text


@dataclass(frozen=True, eq=False)
class TradeoffFit(Fitted):
    """Steps to a target as a function of the global batch size, and what follows from it."""

    overhead: float
    """Fraction of samples above those at `reference` that is accepted."""
    reference: float
    """A batch size in samples."""
    by_form: dict[Form, TradeoffFit] = field(repr=False)
    """This fit, and that of the other form to the same runs."""

    @cached_property
    def s_min(self) -> Estimate:
        """Fewest optimizer steps, at unlimited batch size: a."""
        return estimate_of(self, "s_min")

    @cached_property
    def e_min(self) -> Estimate:
        """Fewest samples, at batch sizes far below the critical one: b."""
        return estimate_of(self, "e_min")

    @cached_property
    def exponent(self) -> Estimate:
        """alpha; 1 by definition in the two-term form."""
        return estimate_of(self, "exponent")

    @cached_property
    def critical_batch_size(self) -> Estimate:
        """Where steps are twice the fewest (`mccandlish`): (b/a)^(1/alpha)."""
        return estimate_of(self, "critical_batch_size")

    @cached_property
    def overhead_batch_size(self) -> Estimate:
        """Largest batch size that needs at most `overhead` more samples than `reference`."""
        return largest_batch(self, self.overhead, self.reference)

    @property
    def n_seeds(self) -> int:
        """Seeds of the typical batch size."""
        return self.measurements.n_seeds

    @property
    def runs(self) -> pd.DataFrame:
        """Rows of the runs behind the fit."""
        return self.measurements.runs

    @property
    def excluded(self) -> pd.DataFrame:
        """Batch sizes left out, as `Measurements.excluded`."""
        return self.measurements.excluded

    def of_form(self, form: Form) -> TradeoffFit | None:
        """Return the fit of one form to the same runs; None where there are too few batch sizes."""
        fit = self.by_form[form]
        return fit if fit.is_fitted else None

    @property
    def is_identified(self) -> bool:
        """Whether the critical batch size is."""
        return self.critical_batch_size.is_identified

    @property
    def why_not(self) -> str | None:
        """Why it is not."""
        return None if self.is_identified else self.critical_batch_size.note

    @property
    def contradiction(self) -> str | None:
        """Why the runs exclude S = a + b/B; None for the other form, or where nothing does."""
        if self.form != "two_term":
            return None
        exponent = self.by_form["free_exponent"].exponent
        if exponent.low > 1 or exponent.high < 1:
            return f"the exponent of the batch size is {exponent.text()}, not 1"
        return self.misfit

    @property
    def fewest_samples(self) -> Estimate:
        """`e_min`, not identified where the runs exclude its form."""
        why = self.contradiction
        if why is None or not self.e_min.is_identified:
            return self.e_min
        return Estimate.unknown(why, self.n_seeds, self.e_min.definition, unit=self.e_min.unit)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was left out, and what weakens the fit as a whole."""
        warnings = [*self.measurements.warnings]
        if not self.is_fitted:
            return tuple(warnings)
        if self.n_seeds < FEWEST:
            seeds = count_text(self.n_seeds, "seed")
            warnings.append(f"{seeds} a batch size: an interval needs {FEWEST}.")
        if self.misfit is not None:
            warnings.append(
                f"{FORMULAS[self.form]} does not describe these runs: its residuals are larger "
                "than the spread between seeds explains (p = "
                f"{significant(self.lack_of_fit_p, 2)}). The interval holds for the best curve of "
                "this form over these very batch sizes."
            )
        if self.form == "two_term" and self.of_form("free_exponent") is None:
            warnings.append(
                "S = a + b/B takes the exponent of the batch size for 1, which "
                f"{N_PARAMETERS['free_exponent'] + 1} batch sizes would test. If it is 0.9 the "
                "critical batch size comes out a quarter too small."
            )
        elif self.contradiction not in (None, self.misfit):
            warnings.append(
                f"T{str(self.contradiction)[1:]} as S = a + b/B takes it: its critical batch size "
                "is off by more than its interval says."
            )
        return tuple(warnings)


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
        raise AnalysisError(f"form must be one of {', '.join(FORMULAS)}, got {form!r}")
    if not 0 < overhead < math.inf:
        raise AnalysisError(
            f"overhead is a fraction above zero, such as 0.2 for 20 % more samples, got {overhead}"
        )
    if reference_batch_size is not None and not 0 < reference_batch_size < math.inf:
        raise AnalysisError(
            "reference_batch_size counts samples and must be above zero, got "
            f"{reference_batch_size}"
        )
    measurements = measure(reaches)
    sizes = measurements.batches
    reference = reference_batch_size or (sizes.min() if len(sizes) else math.nan)
    data, thetas, forms = fit_forms(measurements)
    by_form: dict[Form, TradeoffFit] = {}
    by_form |= {
        each: TradeoffFit(measurements, each, data, theta, forms, overhead, reference, by_form)
        for each, theta in thetas.items()
    }
    is_free = by_form["free_exponent"].is_fitted
    return by_form[form or ("free_exponent" if is_free else "two_term")]
