"""Cost models: terms over geometries, cells, and predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY_WORDS
from batchscape.analysis.cost.linear import Combination, Floats, LinearFit, fit_linear
from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.estimates import NOT_IDENTIFIED, Estimate
from batchscape.text import count_text, list_text


class Cuts(NamedTuple):
    """Geometries, one array a factor."""

    devices: Floats
    micro: Floats
    accumulation: Floats


@dataclass(frozen=True)
class Term:
    """One term of a cost model."""

    weight: Callable[[Cuts], Floats]
    """Multiplier of the coefficient."""
    definition: str
    needs: tuple[str, ...] = ()
    """Factors that must vary to determine it beside the others."""
    may_save: bool = False
    """Whether its coefficient may be negative."""


Terms = Mapping[str, Term]


@dataclass(frozen=True)
class CostFit:
    """One figure of a step, as a sum of terms over the geometry."""

    terms: Terms
    fit: LinearFit
    estimates: dict[str, Estimate]
    """A term's coefficient, by its name; its interval does not reach below zero, but for a term
    that may save."""
    cells: pd.DataFrame
    """One row a measured geometry: the three factors, `n` runs, `measured`, `fitted`, `residual`,
    `left_out` (predicted from the other cells), `left_out_error_pct`, `run_ids`."""
    unit: str
    method: str

    def weights(self, devices: float, micro: float, accumulation: float) -> list[float]:
        """Return the multiplier of each coefficient in one geometry."""
        cut = Cuts(*(np.array(float(value)) for value in (devices, micro, accumulation)))
        return [float(term.weight(cut)) for term in self.terms.values()]

    def at(self, devices: float, micro: float, accumulation: float) -> Estimate:
        """Predict the figure for a geometry that was not measured.

        Parameters
        ----------
        devices, micro, accumulation : float
            Numbers between the possible ones draw a line.
        """
        prediction = self.fit.predict(self.weights(devices, micro, accumulation))
        return estimate_of(prediction, self, "predicted from the fitted cost model", None)


def fit_cost(
    table: pd.DataFrame,
    figure: str,
    terms: Terms,
    *,
    unit: str,
    relative: bool,
    repeats: bool,
) -> CostFit:
    """Fit one figure of a checked table.

    Parameters
    ----------
    table : DataFrame
        As `one_group` returns it.
    figure : str
        Column to fit; rows without it are left out. At least one row must have it.
    relative, repeats : bool
        As `fit_linear` takes them.
    """
    rows = table[table[figure].notna()]
    factors, number = np.unique(
        rows[list(FACTORS)].to_numpy(dtype=float), axis=0, return_inverse=True
    )
    rows_by_cell = [number.reshape(-1) == cell for cell in range(len(factors))]
    figures = rows[figure].to_numpy(dtype=float)
    ids = rows["run_id"].to_numpy(dtype=object) if "run_id" in rows else None
    measured = [figures[rows_of_cell] for rows_of_cell in rows_by_cell]
    cuts = Cuts(*factors.T)
    design = np.column_stack([term.weight(cuts) for term in terms.values()])
    fit = fit_linear(list(terms), design, measured, relative=relative, repeats=repeats)
    means = np.array([values.mean() for values in measured])
    with np.errstate(divide="ignore", invalid="ignore"):
        error_pct = 100 * (fit.left_out / means - 1)
    cells = pd.DataFrame(
        {
            **dict(zip(FACTORS, factors.T.astype(int), strict=True)),
            "n": [len(values) for values in measured],
            "measured": means,
            "fitted": fit.fitted,
            "residual": means - fit.fitted,
            "left_out": fit.left_out,
            "left_out_error_pct": error_pct,
            "run_ids": [
                "" if ids is None else join_ids(ids[rows_of_cell]) for rows_of_cell in rows_by_cell
            ],
        }
    )
    model = CostFit(terms, fit, {}, cells, unit, _method(fit, len(cells), len(rows)))
    for name, term in terms.items():
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

    def estimate(value: float, low: float, high: float, note: str | None) -> Estimate:
        n = len(model.cells)
        return Estimate(value, low, high, n, model.unit, model.method, definition, note)

    if not math.isfinite(combination.value):
        reason = why or "the measured cells do not determine it"
        return estimate(math.nan, math.nan, math.nan, f"{NOT_IDENTIFIED}: {reason}")
    low, high = combination.interval()
    note = None
    if math.isnan(low):
        note = "no interval: no more cells than terms"
    elif model.fit.from_repeats:
        note = "the form itself is not tested: no more cells than terms"
    tiny = -1e-9 * float(np.abs(model.cells["measured"].to_numpy()).max())
    if may_save:
        return estimate(combination.value, low, high, note)
    if high < tiny:
        # Cut off at zero, the interval would be the point 0, a certainty without support.
        reason = (
            f"the fit gives {combination.value:.3g} [{low:.3g}, {high:.3g}] {model.unit}, below "
            "zero, so its form does not hold"
        )
        return estimate(math.nan, math.nan, math.nan, f"{NOT_IDENTIFIED}: {reason}")
    if combination.value < tiny:
        note = (
            f"the fit alone gives {combination.value:.3g} {model.unit}, and it cannot be negative"
        )
    # NaN stays NaN; a value within rounding of zero becomes zero.
    value, low, high = (0.0 if end < -tiny else end for end in (combination.value, low, high))
    return estimate(value, low, high, note)


def outside(cells: pd.DataFrame, devices: int, micro: int, accumulation: int) -> list[str]:
    """Name factors outside the measured cells, as in `micro-batch 64 (measured: 1 to 32)`."""
    texts = []
    for name, value in zip(FACTORS, (devices, micro, accumulation), strict=True):
        low, high = int(cells[name].min()), int(cells[name].max())
        if not low <= value <= high:
            span = f"{low}" if low == high else f"{low} to {high}"
            texts.append(f"{GEOMETRY_WORDS[name]} {value} (measured: {span})")
    return texts


def join_ids(ids: Iterable[object]) -> str:
    """Join the ids of some runs in one text."""
    return ";".join(sorted(map(str, ids)))


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
