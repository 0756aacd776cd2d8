"""A form fitted to means over seeds: its curve, its residuals, its lack of fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from scipy.special import fdtrc

from batchscape.analysis.estimates import FEWEST, LEVEL, t_reach
from batchscape.analysis.numbers import significant
from batchscape.analysis.tradeoff.forms import (
    FORMULAS,
    Data,
    Floats,
    Form,
    aicc,
    fit_form,
    jacobian,
    null_residuals,
    predicted,
)
from batchscape.analysis.tradeoff.intervals import PATHS, band, intervals
from batchscape.analysis.tradeoff.measurements import Measurements
from batchscape.analysis.tradeoff.noise import Noise, noise_of

N_PARAMETERS: dict[Form, int] = {"two_term": 2, "free_exponent": 3}
"""Fitted ones; a form needs one batch size more."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """A form fitted to means over seeds, where there are batch sizes enough."""

    measurements: Measurements
    form: Form
    """The trusted form, or the one that the caller chose."""
    data: Data
    """The means."""
    theta: Floats
    """Shape (1, 3); NaN where nothing was fitted."""
    forms: pd.DataFrame
    """AICc of all forms on the same means, and `delta` from the best; indexed by form."""

    @property
    def is_fitted(self) -> bool:
        """Whether there are batch sizes enough for the form."""
        return len(self.data.x) > N_PARAMETERS[self.form]

    @property
    def parameters(self) -> tuple[float, ...]:
        """a, critical batch size and alpha of the fitted curve, identified or not; NaN without."""
        return tuple(map(math.exp, self.theta[0]))

    @cached_property
    def noise(self) -> Noise | None:
        """Spread between seeds; None for fewer than three of them, or without a fit."""
        if not self.is_fitted or self.measurements.n_seeds < FEWEST:
            return None
        return noise_of(self.measurements.log_steps[None])

    @cached_property
    def critical_ends(self) -> tuple[float, float]:
        """The `ends` of the critical batch size."""
        return self.ends("critical_batch_size")

    def ends(self, quantity: str) -> tuple[float, float]:
        """Return how far, in logarithms, a quantity may lie below and above.

        Infinite: no end. NaN for fewer than three seeds.
        """
        if self.noise is None:
            return math.nan, math.nan
        path = PATHS[self.form][quantity]
        low, high = intervals(self.data, self.noise, self.theta, path)
        return float(low[0]), float(high[0])

    @cached_property
    def batches(self) -> pd.DataFrame:
        """One row a batch size of the fit.

        `global_batch_size`, `runs`, `steps` (geometric mean over seeds), `fitted_steps`, `residual`
        (of log steps), `residual_error` (its standard error, from seeds), `samples`.
        """
        sizes, (logs,) = self.measurements.batches, self.data.y
        fitted = self._curve(self.data.x)
        error = np.full(len(sizes), math.nan)
        if self.noise is not None:
            slope = jacobian(self.data.x, self.theta)[0]
            basis = np.linalg.qr(slope[:, : N_PARAMETERS[self.form]])[0]
            maker = np.eye(len(slope)) - basis @ basis.T
            error = np.sqrt([float(self.noise.variance(row[None])[0][0]) for row in maker])
        return pd.DataFrame(
            {
                "global_batch_size": sizes,
                "runs": self.measurements.counts,
                "steps": np.exp(logs),
                "fitted_steps": np.exp(fitted),
                "residual": logs - fitted,
                "residual_error": error,
                "samples": np.exp(logs) * sizes,
            }
        )

    @cached_property
    def lack_of_fit_p(self) -> float:
        """Probability of residuals as large as these from seeds alone; NaN for one seed.

        The F test of lack of fit. A shift that a seed gives to all batch sizes alike cannot be a
        residual, so the scatter is what is left of log steps after batch size and seed.
        """
        if not self.is_fitted:
            return math.nan
        log_steps = self.measurements.log_steps
        present = ~np.isnan(log_steps)
        batch, seed = np.nonzero(present)
        values = log_steps[present]
        columns = [np.eye(present.shape[0])[batch]]
        if present.sum(axis=0).max() > 1:
            columns.append(np.eye(present.shape[1])[seed])
        design = np.hstack(columns)
        solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
        scatter = float(((values - design @ solution) ** 2).sum())
        degrees, spare = len(values) - int(rank), len(self.data.x) - N_PARAMETERS[self.form]
        if degrees < 1 or scatter == 0:
            return math.nan
        residual = self.data.y[0] - self._curve(self.data.x)
        misfit = float((self.measurements.counts * residual**2).sum())
        return float(fdtrc(spare, degrees, (misfit / spare) / (scatter / degrees)))

    @property
    def misfit(self) -> str | None:
        """That the form does not fit, with the p-value; None where nothing shows it."""
        p = self.lack_of_fit_p
        if not p < 1 - LEVEL:
            return None
        return f"{FORMULAS[self.form]} does not fit these runs (p = {significant(p, 2)})"

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
        log_steps, reach = self._curve(np.log(sizes)), np.full(len(sizes), math.nan)
        if self.noise is not None:
            n = N_PARAMETERS[self.form]
            reach = t_reach(*band(self.data, self.noise, self.theta, np.log(sizes), n))[0]
        logs = {"steps": log_steps, "low": log_steps - reach, "high": log_steps + reach}
        curves = {name: np.exp(values) for name, values in logs.items()}
        return pd.DataFrame({"global_batch_size": sizes, **curves})

    def _curve(self, log_sizes: Floats) -> Floats:
        """Return fitted log steps; NaN where nothing was fitted."""
        if not self.is_fitted:
            return log_sizes * math.nan
        return np.asarray(predicted(log_sizes, self.theta)[0])


def fit_forms(measurements: Measurements) -> tuple[Data, dict[Form, Floats], pd.DataFrame]:
    """Fit both forms to the means over seeds, and compare all forms by AICc over batch sizes.

    Returns
    -------
    tuple
        `Fitted.data`, `Fitted.theta` by form, and `Fitted.forms`.
    """
    means = np.nanmean(measurements.log_steps, axis=1)[None]
    data, n = Data(np.log(measurements.batches), means), means.shape[1]
    fits = {form: fit_form(data, form) for form, least in N_PARAMETERS.items() if n > least}
    nulls = null_residuals(data) if fits else {}
    squares = {name: (values, 1) for name, values in nulls.items()}
    squares |= {form: (values, N_PARAMETERS[form]) for form, (_, values) in fits.items()}
    criteria = {name: aicc(float(values[0]), n, count) for name, (values, count) in squares.items()}
    forms = pd.DataFrame({"aicc": pd.Series(criteria, dtype=float)}).rename_axis("form")
    thetas = {form: np.full((1, 3), math.nan) for form in N_PARAMETERS}
    thetas |= {form: theta for form, (theta, _) in fits.items()}
    return data, thetas, forms.assign(delta=forms["aicc"] - forms["aicc"].min())
