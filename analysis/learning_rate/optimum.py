"""The best learning rate of each global batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import NOT_IDENTIFIED, Estimate
from batchscape.analysis.learning_rate.lowest_point import Optimum, optimum_of
from batchscape.analysis.learning_rate.table import costs_by_rate, series_of

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
    rows = []
    for place, series in series_of(costs):
        for batch, batch_costs in series.groupby("global_batch_size"):
            rows.append({**place, "global_batch_size": batch, **_row(batch_costs)})
    best = pd.DataFrame(rows)
    tried = best["n_learning_rates"].where(best["edge"] != "single")
    unequal = (
        tried.groupby([best["group"], best["target_loss"].fillna(0.0)]).transform("nunique") > 1
    )
    unequal &= tried.notna()
    # The lowest of more noisy numbers is lower.
    reason = "other batches had another number of rates, and the best of more looks better"
    best.loc[unequal, "note"] = best.loc[unequal, "note"].map(lambda note: _and(note, reason))
    return best.astype({"note": object})


def optimum_estimate(row: pd.Series[Any]) -> Estimate:
    """Turn a row of `best_learning_rates` into an estimate."""
    note = row["note"]
    return Estimate(
        value=float(row["learning_rate"]),
        low=float(row["low"]),
        high=float(row["high"]),
        n=int(row["n"]),
        unit="",
        method=str(row["method"]),
        definition=_DEFINITION,
        note=note if isinstance(note, str) else None,
    )


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
    most = np.sort(counts)[::-1]
    second = most[1] if len(most) > 1 and most[1] > 1 else most[0]
    needed = most[0] if (2 * counts >= most[0]).sum() > 1 else second
    return [float(rate) for rate in rates[2 * counts >= needed]]


def _row(costs: pd.DataFrame) -> dict[str, object]:
    """Return a row of `best_learning_rates` from the costs of one batch."""
    rates, column = np.unique(costs["learning_rate"], return_inverse=True)
    seeds, row = np.unique(costs["seed"], return_inverse=True)
    grid = np.full((len(seeds), len(rates)), np.nan)
    grid[row, column] = costs["cost"]
    often = np.isin(rates, tried_often(costs))
    rare = [f"{rate:g}" for rate in rates[~often]]
    note = f"tried by too few seeds to be compared: {', '.join(rare)}" if rare else None
    grid, rates = grid[:, often], rates[often]
    ran = ~np.isnan(grid)
    if not ran.all(axis=1).any():
        # Rates that few seeds tried cannot be paired with the others.
        most = ran.sum(axis=0) == ran.sum(axis=0).max()
        grid, rates, ran = grid[:, most], rates[most], ran[:, most]
        note = _and(note, "rates that fewer seeds tried are left out")
    elif ran.all(axis=1).sum() < ran.any(axis=1).sum():
        only = int(ran.all(axis=1).sum())
        note = _and(note, f"only the {only} seeds that ran at every rate are compared")
    complete = grid[ran.all(axis=1)]
    counts = {"n": len(complete), "n_learning_rates": len(rates)}
    if not len(complete):
        reason = f"{NOT_IDENTIFIED}: no seed ran at two learning rates"
        optimum = Optimum(-1, math.nan, -math.inf, math.inf, "none", reason)
    elif len(rates) == 1:
        reason = f"{NOT_IDENTIFIED}: one learning rate was tried"
        best = 0 if np.isfinite(complete).all() else -1
        optimum = Optimum(best, math.nan, -math.inf, math.inf, "none", reason)
    else:
        optimum = optimum_of(np.log(rates), complete)
    worked = optimum.best >= 0
    edge = {0: "lowest", len(rates) - 1: "highest"}.get(optimum.best, "") if worked else ""
    edge = "single" if worked and len(rates) == 1 else edge
    return {
        "learning_rate": math.exp(optimum.value),
        "low": math.exp(optimum.low),
        # Fieller's ends run off without limit where the curvature is hardly there.
        "high": math.inf if optimum.high >= _FARTHEST else math.exp(optimum.high),
        **counts,
        "grid_factor": math.exp(optimum.reach) if optimum.reach < _FARTHEST else math.inf,
        "method": optimum.method,
        "note": _and(note, optimum.note),
        "grid_learning_rate": float(rates[optimum.best]) if worked else math.nan,
        "tuned": worked and not edge,
        "edge": edge,
        "value_at_best": float(complete[:, optimum.best].mean()) if worked else math.inf,
    }


def _and(first: object, second: object) -> str | None:
    return "; ".join(note for note in (first, second) if isinstance(note, str)) or None
