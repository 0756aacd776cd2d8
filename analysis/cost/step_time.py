"""Time of an optimizer step: micro-steps, the exchange of gradients, the update."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from batchscape.analysis.cost.linear import Combination, welch
from batchscape.analysis.cost.model import CostFit, Form, Term, fit_cost
from batchscape.analysis.cost.table import FACTORS, TIME_PARTS, one_group
from batchscape.analysis.estimates import NOT_IDENTIFIED, Estimate
from batchscape.analysis.joins import column_of
from batchscape.analysis.numbers import significant
from batchscape.errors import AnalysisError
from batchscape.step_time import weights

_MICRO_STEPS = {
    "micro_step_fixed_s": Term(
        "time of a micro-step that does not grow with the micro-batch", ("micro_batch_size",)
    ),
    "per_sample_s": Term(
        "time that each further sample of a micro-batch takes", ("micro_batch_size",)
    ),
}
_EXCHANGE = {
    "exchange_s": Term(
        "time of the gradient exchange that backward does not hide, at two devices; at D devices "
        "times 2 (D - 1) / D, the bytes that a ring moves",
        ("data_parallel_size",),
    )
}
_OPTIMIZER = {
    "optimizer_s": Term(
        "time of an optimizer step outside micro-steps and exchange: clipping and update",
        ("gradient_accumulation_steps", "micro_batch_size"),
    )
}

WIDEST = 10.0
"""Largest ratio of the ends of an interval with which a step time counts as identified."""


@dataclass(frozen=True)
class StepTimeModel:
    """Time of an optimizer step over geometries."""

    parts: list[CostFit]
    """Fits whose sum is the step time: one of all terms, or one a part measured apart."""
    estimates: dict[str, Estimate]
    """`micro_step_fixed_s` (alpha), `per_sample_s` (beta), `exchange_s`, `optimizer_s`."""
    cells: pd.DataFrame
    """One row a measured geometry: the three factors, `n`, `measured`, `fitted`, `residual`,
    `left_out` (predicted from the other cells), `left_out_error_pct`, `run_ids`."""

    def at(self, devices: int, micro: int, accumulation: int) -> Estimate:
        """Predict the step time of a geometry that was not measured, in seconds.

        Not identified where the ends of its interval are more than `WIDEST` times apart, or the
        fit gives no time above zero.
        """
        combination = self.combine(devices, micro, accumulation)
        about = Term("mean of the step time of a cell, predicted from the fitted cost model")
        estimate = self.parts[0].estimate(combination, about)
        if not math.isfinite(combination.value):
            return estimate
        cut = f"a run of {devices} x {micro} x {accumulation} would tell"
        if combination.value <= 0:
            fitted = significant(combination.value, 2)
            reason = f"{NOT_IDENTIFIED}: the fit gives {fitted} s, and no step takes none; {cut}"
            return replace(estimate, value=math.nan, note=reason)
        # Errors are relative, so the interval is of the logarithm and stays above zero.
        spread = replace(
            combination, value=0.0, variance=combination.variance / combination.value**2
        )
        below, above = spread.interval()
        with np.errstate(over="ignore", under="ignore"):
            low, high, apart_by = np.exp([below, above, above - below]).tolist()
        low, high = combination.value * low, combination.value * high
        if apart_by > WIDEST:
            ratio_text = f"its interval has ends {significant(apart_by, 2)} times apart"
            reason = f"{NOT_IDENTIFIED}: {ratio_text}; {cut}"
            return replace(estimate, value=math.nan, low=low, high=high, note=reason)
        return replace(estimate, low=low, high=high)

    def combine(self, devices: int, micro: int, accumulation: int) -> Combination:
        """Predict the same as a value and its variance."""
        factors = [part.weights(devices, micro, accumulation) for part in self.parts]
        if devices > 1 and not any("exchange_s" in part.estimates for part in self.parts):
            return Combination(math.nan, math.nan, 0.0)
        # A part without weight, such as the exchange of one device, is zero.
        weighted = [(p, w) for p, w in zip(self.parts, factors, strict=True) if any(w)]
        parts = [part.fit.predict(weight) for part, weight in weighted]
        variance, degrees = welch([(part.variance, part.degrees) for part in parts])
        return Combination(sum(part.value for part in parts), float(variance), float(degrees))


def fit_step_time(table: pd.DataFrame) -> StepTimeModel:
    """Fit step time = A (alpha + beta M) + exchange(D) + optimizer.

    Where exchange and update were measured apart, each part is fitted to its own figures; else
    all terms are fitted to the step time. Errors are taken as relative: a slow cell departs from
    the form by more seconds than a fast one.

    Parameters
    ----------
    table : DataFrame
        One row a run of one machine, model and setting: `data_parallel_size` (D),
        `micro_batch_size` (M), `gradient_accumulation_steps` (A), `step_time_s`, and optionally
        `exchange_s` (what backward did not hide) and `optimizer_s`. NaN where the machine was not
        free.

    Returns
    -------
    StepTimeModel
        A term that the cells do not determine is not identified, with the reason.

    Raises
    ------
    AnalysisError
        As `check` does, or if the table has several groups, or no row a valid time.

    Notes
    -----
    The form is `batchscape.step_time`'s. Hops between machines differ, so fit runs of one node
    apart from those of several.
    """
    rows = one_group(table, ["step_time_s"])
    if rows.empty:
        raise AnalysisError(
            "no run has a valid time: step_time_s counts where the run was completed and had the "
            "machine to itself; launch with launcher.concurrent_runs=1, no more ranks than cores, "
            "and a timing_repeat that no run has yet"
        )
    parts = _fit_parts(rows)
    estimates = {name: estimate for part in parts for name, estimate in part.estimates.items()}
    if "exchange_s" not in estimates:
        why = "the cells with valid times are all of one device"
        unknown = Combination(math.nan, math.nan, 0.0)
        estimates["exchange_s"] = parts[0].estimate(unknown, _EXCHANGE["exchange_s"], why)
    return StepTimeModel(parts, estimates, _sum_of_cells(parts, rows))


def _fit_parts(rows: pd.DataFrame) -> list[CostFit]:
    def fit(figure: pd.Series[float], terms: dict[str, Term]) -> CostFit:
        return fit_cost(rows, figure, Form(terms, weights, "s", is_time=True))

    is_parallel = rows["data_parallel_size"] > 1
    exchange, update = (pd.to_numeric(column_of(rows, n)).astype(float) for n in TIME_PARTS)
    exchange = exchange.where(is_parallel, 0.0)
    compute = rows["step_time_s"] - (exchange + update)
    # NaN, in any comparison, is no time.
    if not ((compute > 0) & (update > 0) & ((exchange > 0) | ~is_parallel)).all():
        # Some runs lack the ends of exchange and update, so only the sum is fitted.
        terms = _MICRO_STEPS | (_EXCHANGE if is_parallel.any() else {}) | _OPTIMIZER
        return [fit(rows["step_time_s"], terms)]
    parts = [fit(compute, _MICRO_STEPS)]
    if is_parallel.any():
        parts.append(fit(exchange[is_parallel], _EXCHANGE))
    return [*parts, fit(update, _OPTIMIZER)]


def _sum_of_cells(parts: list[CostFit], rows: pd.DataFrame) -> pd.DataFrame:
    """Sum the parts by cell; a part that a cell lacks, such as an exchange, is zero."""
    keys = list(FACTORS)
    total, *others = (part.cells.set_index(keys) for part in parts)
    total["measured"] = rows["step_time_s"].groupby([rows[key] for key in keys]).mean()
    for cells in others:
        sums = ["fitted", "left_out"]
        total[sums] += cells[sums].reindex(total.index, fill_value=0.0)
    total["residual"] = total["measured"] - total["fitted"]
    total["left_out_error_pct"] = 100 * (total["left_out"] / total["measured"] - 1)
    return total.reset_index()
