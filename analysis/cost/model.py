"""Cost models: terms over geometries, cells, and predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY_WORDS
from batchscape.analysis.cost.linear import Combination, LinearFit, fit_linear
from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.estimates import Estimate
from batchscape.text import count_text, list_text


@dataclass(frozen=True)
class Term:
    """One term of a cost model."""

    definition: str
    needs: tuple[str, ...] = ()
    """Factors that must vary to determine it beside the others."""
    may_save: bool = False
    """Whether its coefficient may be negative."""


@dataclass(frozen=True)
class Form:
    """The form of one figure of a step: a sum of terms over the geometry."""

    terms: Mapping[str, Term]
    weights: Callable[[Any, Any, Any], Mapping[str, Any]]
    """Returns the multiplier of each coefficient, of arrays of devices, micro-batch and
    accumulation."""
    unit: str
    is_time: bool = False
    """Whether errors are relative, and repeats of a cell differ."""


@dataclass(frozen=True)
class CostFit:
    """One figure of a step, as a sum of terms over the geometry."""

    form: Form
    fit: LinearFit
    estimates: dict[str, Estimate]
    """A term's coefficient, by its name; its interval does not reach below zero, but for a term
    that may save."""
    cells: pd.DataFrame
    """One row a measured geometry: the three factors, `n` runs, `measured`, `fitted`, `residual`,
    `left_out` (predicted from the other cells), `left_out_error_pct`, `run_ids`."""
    method: str

    def weights(self, devices: float, micro: float, accumulation: float) -> list[float]:
        """Return the multiplier of each coefficient in one geometry."""
        weights = self.form.weights(*map(np.float64, (devices, micro, accumulation)))
        return [float(weights[name]) for name in self.form.terms]

    def at(self, devices: float, micro: float, accumulation: float) -> Estimate:
        """Predict the figure for a geometry that was not measured.

        Parameters
        ----------
        devices, micro, accumulation : float
            Numbers between the possible ones draw a line.
        """
        prediction = self.fit.predict(self.weights(devices, micro, accumulation))
        return self.estimate(prediction, Term("predicted from the fitted cost model"))

    def estimate(
        self,
        combination: Combination,
        term: Term,
        why: str = "the measured cells do not determine it",
    ) -> Estimate:
        """Turn a combination of coefficients into an estimate, which only savings make negative."""
        unit, (low, high) = self.form.unit, combination.interval()
        note = None
        if math.isnan(low):
            note = "no interval: no more cells than terms"
        elif self.fit.from_repeats:
            note = "the form itself is not tested: no more cells than terms"
        tiny = -1e-9 * float(self.cells["measured"].abs().max())
        if math.isfinite(combination.value):
            # Cut off at zero, the interval would be the point 0, a certainty without support.
            why = (
                f"the fit gives {combination.value:.3g} [{low:.3g}, {high:.3g}] {unit}, below "
                "zero, so its form does not hold"
            )
        if not math.isfinite(combination.value) or (high < tiny and not term.may_save):
            return Estimate.unknown(
                why, len(self.cells), term.definition, unit=unit, method=self.method
            )
        ends = combination.value, low, high
        if not term.may_save:
            # NaN stays NaN; a value within rounding of zero becomes zero.
            value, low, high = (0.0 if end < -tiny else end for end in ends)
            ends = value, low, high
            if combination.value < tiny:
                fitted = f"the fit alone gives {combination.value:.3g} {unit}"
                note = f"{fitted}, and it cannot be negative"
        return Estimate(*ends, len(self.cells), unit, self.method, term.definition, note)


def fit_cost(table: pd.DataFrame, figure: pd.Series[float], form: Form) -> CostFit:
    """Fit one figure of a checked table.

    Parameters
    ----------
    table : DataFrame
        As `one_group` returns it.
    figure : Series
        Of the rows of the table; those without it are left out. At least one must have it.
    """
    values = figure.astype(float).dropna()
    keys = [table.loc[values.index, name].astype(int) for name in FACTORS]
    groups = values.groupby(keys)
    cells = groups.agg(n="size", measured="mean").reset_index()
    weights = form.weights(*(cells[name].to_numpy(dtype=float) for name in FACTORS))
    design = np.column_stack([weights[name] for name in form.terms])
    measured = [numbers.to_numpy() for _, numbers in groups]
    fit = fit_linear(design, measured, is_relative=form.is_time)
    ids = table["run_id"] if "run_id" in table else pd.Series("", table.index)
    names = ids[values.index].astype(str).groupby(keys)
    means = cells["measured"]
    cells = cells.assign(
        fitted=fit.fitted,
        residual=means - fit.fitted,
        left_out=fit.left_out,
        left_out_error_pct=100 * (fit.left_out / means - 1),
        run_ids=names.agg(lambda ids: ";".join(sorted(ids))).to_numpy(),
    )
    model = CostFit(form, fit, {}, cells, _method(fit, len(cells), len(values)))
    for row, (name, term) in zip(np.eye(len(form.terms)), form.terms.items(), strict=True):
        why = _why_undetermined(term, cells)
        model.estimates[name] = model.estimate(fit.combine(row), term, why)
    return model


def outside(cells: pd.DataFrame, devices: int, micro: int, accumulation: int) -> list[str]:
    """Name factors outside the measured cells, as in `micro-batch 64 (measured: 1 to 32)`."""
    texts = []
    for name, value in zip(FACTORS, (devices, micro, accumulation), strict=True):
        measured = {int(cells[name].min()), int(cells[name].max())}
        if not min(measured) <= value <= max(measured):
            span = " to ".join(map(str, sorted(measured)))
            texts.append(f"{GEOMETRY_WORDS[name]} {value} (measured: {span})")
    return texts


def _why_undetermined(term: Term, cells: pd.DataFrame) -> str:
    names = {**GEOMETRY_WORDS, "data_parallel_size": "number of devices"}
    constant = [names[name] for name in term.needs if cells[name].nunique() == 1]
    if constant:
        return f"the measured cells are all of one {list_text(constant, 'and one')}"
    needs = list_text((names[name] for name in term.needs), "and")
    return f"{needs} vary only together with other terms" if needs else "too few cells"


def _method(fit: LinearFit, cells: int, runs: int) -> str:
    weighted = "least squares of relative errors" if fit.is_relative else "least squares"
    over = f"{weighted} over the means of {count_text(cells, 'cell')} ({count_text(runs, 'run')})"
    if fit.from_repeats:
        return f"{over}, t-interval of {fit.degrees:g} degrees from repeats within cells"
    if fit.degrees > 0:
        return f"{over}, t-interval of {fit.degrees:g} degrees between cells"
    return f"{over}, no interval"
