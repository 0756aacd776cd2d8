"""Reaches summed up: one row a group, global batch, learning rate and target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import Estimate
from batchscape.analysis.targets.censoring import median_with_infinity
from batchscape.analysis.targets.crossings import OUTCOMES, TO_TARGET
from batchscape.analysis.targets.tidy import distinct_trajectories, refuse_missing

__all__ = ["reaches_table", "tidy_reaches"]

_KEYS = ("group", "global_batch_size", "program_cut", "learning_rate", "target_loss")


def tidy_reaches(reaches: pd.DataFrame) -> pd.DataFrame:
    """Complete reaches that came without the columns that `steps_to_target` gives.

    Parameters
    ----------
    reaches : DataFrame
        With `global_batch_size` and `steps_to_target` at least.

    Returns
    -------
    DataFrame
        With `group` (0), `seed` (NaN), `target_loss` (NaN), `outcome` ("reached" where the steps
        are finite, "diverged" where they are infinite, else "censored"), all columns of what it
        took, `steps_low` and `steps_high`.

    Raises
    ------
    AnalysisError
        If the table is empty or lacks its needed columns.
    """
    refuse_missing(reaches, ["global_batch_size", "steps_to_target"], "a table of reaches")
    reaches = reaches.reset_index(drop=True)
    for name, value in {"group": 0, "seed": np.nan, "target_loss": np.nan}.items():
        if name not in reaches:
            reaches[name] = value
    steps = reaches["steps_to_target"].astype(float)
    if "outcome" not in reaches:
        missing = np.where(steps.isna(), "censored", "diverged")
        reaches["outcome"] = np.where(np.isfinite(steps), "reached", missing)
    reached = reaches["outcome"].eq("reached")
    reaches["steps_to_target"] = steps.where(reached)
    if "samples_to_target" not in reaches:
        reaches["samples_to_target"] = steps.where(reached) * reaches["global_batch_size"]
    for name in TO_TARGET:
        if name not in reaches:
            reaches[name] = np.nan
    if "steps_low" not in reaches:
        reaches["steps_low"] = steps.where(reached, 0.0)
        reaches.loc[reaches["outcome"].eq("diverged"), "steps_low"] = np.inf
        reaches["steps_high"] = steps.where(reached, np.inf)
    return reaches


def reaches_table(reaches: pd.DataFrame) -> pd.DataFrame:
    """Sum up how the runs of each global batch stand to each target.

    Parameters
    ----------
    reaches : DataFrame
        As `steps_to_target` or `read_table` returns it. Of runs of one trajectory one counts.

    Returns
    -------
    DataFrame
        One row a group, target, global batch (and `program_cut`, where programs of others ran) and
        learning rate, in this order: `n`, `n_reached`,
        `n_censored`, `n_pruned`, `n_diverged`; of each of steps, samples, tokens and time the
        median with infinity (`steps_to_target`, `..._low`, `..._high`) and, where all runs
        reached, the geometric mean (`..._geometric_mean`); `crossing`, `interpolation_error`
        (median) and `run_ids`. A median that censored runs leave open is NaN, its lower end still
        stands.
    """
    reaches = distinct_trajectories(tidy_reaches(reaches))
    apart = "program_cut" in reaches and reaches["program_cut"].notna().any()
    keys = [n for n in _KEYS if n in reaches and (apart or n != "program_cut")]
    order = [name for name in ("group", "target_loss", *_KEYS) if name in keys]
    rows = []
    for values, cell in reaches.groupby(keys, dropna=False, sort=True, observed=True):
        row: dict[str, Any] = dict(zip(keys, values, strict=True))
        counts = cell["outcome"].value_counts()
        row |= {"n": len(cell), **{f"n_{o}": int(counts.get(o, 0)) for o in OUTCOMES}}
        for name in TO_TARGET:
            row |= _figures(cell, name)
        if "crossing" in cell:
            row["crossing"] = cell["crossing"].iloc[0]
        if "interpolation_error" in cell:
            row["interpolation_error"] = cell["interpolation_error"].median()
        runs = cell.get("run_id", cell.get("run", pd.Series(dtype=object)))
        row["run_ids"] = " ".join(sorted(map(str, runs.dropna().unique())))
        rows.append(row)
    table = pd.DataFrame(rows)
    falling = [name != "target_loss" for name in dict.fromkeys(order)]
    return table.sort_values(list(dict.fromkeys(order)), ascending=falling, ignore_index=True)


def _figures(cell: pd.DataFrame, name: str) -> dict[str, float]:
    """Median and geometric mean of one of the columns of what it took."""
    values, steps_low = (
        cell[column].to_numpy(dtype=float, na_value=np.nan) for column in (name, "steps_low")
    )
    outcome = cell["outcome"].to_numpy()
    ends: dict[str, float] = {name: np.nan, f"{name}_low": np.nan, f"{name}_high": np.nan}
    unknown = np.isnan(values)
    if not unknown[outcome == "reached"].any():
        # How many tokens or seconds a run saw without reaching is not carried: from 0 on.
        of_a_step = {"steps_to_target": 1.0, "samples_to_target": cell["global_batch_size"].iloc[0]}
        bound = np.where(np.isin(outcome, ("censored", "pruned")), steps_low, 0.0)
        bound = np.where(outcome == "diverged", np.inf, bound * float(of_a_step.get(name, 0.0)))
        low, high = np.where(unknown, bound, values), np.where(unknown, np.inf, values)
        found: Estimate = median_with_infinity(low, high)
        ends = {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    logs = np.log(np.where(values > 0, values, np.nan))
    ends[f"{name}_geometric_mean"] = float(np.exp(logs.mean()))
    return ends
