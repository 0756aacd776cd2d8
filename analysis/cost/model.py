"""Cost models: terms over geometries, cells, and predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
        return estimate_of(prediction, self, "predicted from the fitted cost model", None)


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
    fit = fit_linear(
        list(form.terms), design, measured, relative=form.is_time, repeats=form.is_time
    )
    ids = table["run_id"] if "run_id" in table else pd.Series("", table.index)
    means = cells["measured"]
    cells = cells.assign(
        fitted=fit.fitted,
        residual=means - fit.fitted,
        left_out=fit.left_out,
        left_out_error_pct=100 * (fit.left_out / means - 1),
        run_ids=ids[values.index]
        .groupby(keys)
        .agg(lambda names: ";".join(sorted(map(str, names))))
        .to_numpy(),
    )
    model = CostFit(form, fit, {}, cells, _method(fit, len(cells), len(values)))
    for name, term in form.terms.items():
        why = _why_undetermined(term, cells)
        model.estimates[name] = estimate_of(
            fit.term(name), model, term.definition, why, may_save=term.may_save
        )
    return model


def estimate_of(
    combination: Combination,
    model: CostFit,
    definition: str,
    why: str | None,
    *,
    may_save: bool = False,
) -> Estimate:
    """Turn a combination of coefficients into an estimate, which only savings make negative."""
    n, unit = len(model.cells), model.form.unit
    low, high = combination.interval()
    note = None
    if math.isnan(low):
        note = "no interval: no more cells than terms"
    elif model.fit.from_repeats:
        note = "the form itself is not tested: no more cells than terms"
    estimate = Estimate(combination.value, low, high, n, unit, model.method, definition, note)
    tiny = -1e-9 * float(model.cells["measured"].abs().max())
    unknown = None
    if not math.isfinite(combination.value):
        unknown = why or "the measured cells do not determine it"
    elif high < tiny and not may_save:
        # Cut off at zero, the interval would be the point 0, a certainty without support.
        unknown = (
            f"the fit gives {combination.value:.3g} [{low:.3g}, {high:.3g}] {unit}, below zero, so "
            "its form does not hold"
        )
    if unknown is not None:
        return Estimate.unknown(unknown, n, definition, unit=unit, method=model.method)
    if may_save:
        return estimate
    if combination.value < tiny:
        note = f"the fit alone gives {combination.value:.3g} {unit}, and it cannot be negative"
    # NaN stays NaN; a value within rounding of zero becomes zero.
    value, low, high = (0.0 if end < -tiny else end for end in (combination.value, low, high))
    return replace(estimate, value=value, low=low, high=high, note=note)


def outside(cells: pd.DataFrame, devices: int, micro: int, accumulation: int) -> list[str]:
    """Name factors outside the measured cells, as in `micro-batch 64 (measured: 1 to 32)`."""
    texts = []
    for name, value in zip(FACTORS, (devices, micro, accumulation), strict=True):
        low, high = int(cells[name].min()), int(cells[name].max())
        if not low <= value <= high:
            span = f"{low}" if low == high else f"{low} to {high}"
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
    weighted = "least squares of relative errors" if fit.relative else "least squares"
    over = f"{weighted} over the means of {count_text(cells, 'cell')} ({count_text(runs, 'run')})"
    if fit.from_repeats:
        return f"{over}, t-interval of {fit.degrees:g} degrees from repeats within cells"
    if fit.degrees > 0:
        return f"{over}, t-interval of {fit.degrees:g} degrees between cells"
    return f"{over}, no interval"
