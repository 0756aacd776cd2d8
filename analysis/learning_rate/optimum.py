"""The best learning rate of each global batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import NOT_IDENTIFIED, Estimate
from batchscape.analysis.learning_rate.lowest_point import Optimum, optimum_of
from batchscape.analysis.learning_rate.table import SERIES, costs_by_rate

_FARTHEST = 700.0
"""Logarithm beyond which an end is none: its exponential has no floating-point number."""
_DEFINITION = (
    "lowest point of a parabola in rate^p, with p fitted too, through the mean costs over seeds at "
    "the best rate of the grid and its neighbours"
)


def best_learning_rates(table: pd.DataFrame, value: str = "final_eval_loss") -> pd.DataFrame:
    """Estimate the best learning rate of every global batch.

    Parameters
    ----------
    table : DataFrame
        One row a run: `global_batch_size`, `learning_rate`, `seed` and `value`; optionally
        `group`, `target_loss` (each combination is a series of its own), `status`, `outcome`,
        `trajectory_id`.
    value : str
        What is minimised: `steps_to_target` (on a log scale), or a loss.

    Returns
    -------
    DataFrame
        One row for each `group`, `target_loss` and `global_batch_size`: `learning_rate` (NaN: not
        identified), `low`, `high` (its interval; 0 and infinity are no ends, NaN: there is none),
        `n` (seeds), `grid_factor` (by how much the grid alone leaves it open, up and down),
        `method`, `note`, `grid_learning_rate` (the best of those tried; NaN: none
        worked), `tuned` (the optimum lies inside the grid), `edge` (`lowest` or `highest`: it lies
        at most, at least there; `single`: one rate was tried; empty otherwise), `value_at_best`
        (mean cost at `grid_learning_rate`; the logarithm of steps for `steps_to_target`) and
        `n_learning_rates`.

    Raises
    ------
    AnalysisError
        As `costs_by_rate` does.
    """
    return optima_of(costs_by_rate(table, value))


def optima_of(costs: pd.DataFrame) -> pd.DataFrame:
    """Return `best_learning_rates` of a table that `costs_by_rate` made."""
    rows: list[dict[str, Any]] = []
    for values, series in costs.groupby([*SERIES], dropna=False):
        place = dict(zip(SERIES, values, strict=True))
        optima = [
            {**place, "global_batch_size": batch, **_row(batch_costs)}
            for batch, batch_costs in series.groupby("global_batch_size")
        ]
        several = [row for row in optima if row["edge"] != "single"]
        if len({row["n_learning_rates"] for row in several}) > 1:
            # The lowest of more noisy numbers is lower.
            reason = "other batches had another number of rates, and the best of more looks better"
            for row in several:
                row["note"] = "; ".join(filter(None, [row["note"], reason]))
        rows += optima
    return pd.DataFrame(rows).astype({"note": object})


def optimum_estimate(row: pd.Series[Any]) -> Estimate:
    """Turn a row of `best_learning_rates` into an estimate."""
    value, low, high = (float(row[name]) for name in ("learning_rate", "low", "high"))
    note = row["note"] if isinstance(row["note"], str) else None
    return Estimate(value, low, high, int(row["n"]), "", row["method"], _DEFINITION, note)


def tried_often(costs: pd.DataFrame) -> list[float]:
    """Return the learning rates of one batch that enough seeds tried to be compared.

    A seed counts only at rates that it shares with the others, so that one seed at a new rate would
    cost all the other seeds. Rates of fewer than half as many seeds as the most-tried one are left
    out; where no other stays, they are measured by the second one, if several seeds tried that.

    Parameters
    ----------
    costs : DataFrame
        Rows of one batch of `costs_by_rate`.

    Returns
    -------
    list of float
        Ascending.
    """
    rates, counts = np.unique(costs["learning_rate"], return_counts=True)
    first, second = sorted([0, *counts])[:-3:-1]
    is_alone = 2 * second < first
    needed = second if is_alone and second > 1 else first
    return [float(rate) for rate in rates[2 * counts >= needed]]


def _row(costs: pd.DataFrame) -> dict[str, Any]:
    """Return a row of `best_learning_rates` from the costs of one batch."""
    rates, column = np.unique(costs["learning_rate"], return_inverse=True)
    seeds, row = np.unique(costs["seed"], return_inverse=True)
    grid = np.full((len(seeds), len(rates)), np.nan)
    grid[row, column] = costs["cost"]
    often = np.isin(rates, tried_often(costs))
    rare = ", ".join(f"{rate:g}" for rate in rates[~often])
    notes = [f"tried by too few seeds to be compared: {rare}"] * bool(rare)
    grid, rates = grid[:, often], rates[often]
    ran = ~np.isnan(grid)
    n_whole = int(ran.all(axis=1).sum())
    if not n_whole:
        # Rates that few seeds tried cannot be paired with the others.
        most = ran.sum(axis=0) == ran.sum(axis=0).max()
        grid, rates = grid[:, most], rates[most]
        notes.append("rates that fewer seeds tried are left out")
    elif n_whole < ran.any(axis=1).sum():
        notes.append(f"only the {n_whole} seeds that ran at every rate are compared")
    complete = grid[~np.isnan(grid).any(axis=1)]
    n, n_rates = complete.shape
    if n and n_rates > 1:
        optimum = optimum_of(np.log(rates), complete)
    else:
        why = "one learning rate was tried" if n else "no seed ran at two learning rates"
        only = 0 if n and np.isfinite(complete).all() else -1
        reason = f"{NOT_IDENTIFIED}: {why}"
        optimum = Optimum(only, math.nan, -math.inf, math.inf, "none", reason)
    best, worked = optimum.best, optimum.best >= 0
    edge = {0: "lowest", n_rates - 1: "highest"}.get(best, "")
    edge = "single" if edge and n_rates == 1 else edge
    return {
        "learning_rate": math.exp(optimum.value),
        "low": math.exp(optimum.low),
        # Fieller's ends run off without limit where the curvature is hardly there.
        "high": math.inf if optimum.high >= _FARTHEST else math.exp(optimum.high),
        "n": n,
        "n_learning_rates": n_rates,
        "grid_factor": math.exp(optimum.reach) if optimum.reach < _FARTHEST else math.inf,
        "method": optimum.method,
        "note": "; ".join(filter(None, [*notes, optimum.note])) or None,
        "grid_learning_rate": float(rates[best]) if worked else math.nan,
        "tuned": worked and not edge,
        "edge": edge,
        "value_at_best": float(complete[:, best].mean()) if worked else math.inf,
    }
