"""Reaches summed up: one row a group, global batch, learning rate and target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import Estimate, half_widths
from batchscape.analysis.targets.censoring import median_with_infinity
from batchscape.analysis.targets.ends import TO_TARGET
from batchscape.analysis.targets.schema import OUTCOMES, check
from batchscape.analysis.targets.tidy import distinct_trajectories

MEAN = "geometric mean"
"""Statistic of a cell whose runs all reached."""
MEDIAN = "median"
"""Statistic of any other cell; a run that did not reach is infinite, or above its bound."""
_BOUNDS = {
    "steps_to_target": "steps_low",
    "samples_to_target": "steps_low",
    "tokens_to_target": "tokens_low",
    "time_to_target_s": "time_low_s",
}
_KEYS = ("group", "global_batch_size", "program_cut", "learning_rate", "target_loss")


def tidy_reaches(reaches: pd.DataFrame) -> pd.DataFrame:
    """Add the columns of `steps_to_target` that a foreign table of reaches lacks."""
    needed, others = ("global_batch_size", "steps_to_target"), (*TO_TARGET, "outcome")
    reaches = check(reaches, "a table of steps to target", needed, others).reset_index(drop=True)
    for name, value in {"group": 0, "seed": np.nan, "target_loss": np.nan}.items():
        if name not in reaches:
            reaches[name] = value
    steps = reaches["steps_to_target"]
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
        `n_censored`, `n_pruned`, `n_diverged`; `statistic`, and that of each of steps, samples,
        tokens and time (`steps_to_target`, `..._low`, `..._high`); `crossing`,
        `interpolation_error` (median) and `run_ids`.

    Notes
    -----
    The statistic is what learning rates are chosen by: the geometric mean with the t-interval of
    the mean logarithm where all runs reached, else the median with infinity, whose value is NaN
    where censored runs leave it open (its lower end still stands). Times depend on the cut: a row
    with several cuts has none.
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
        row["statistic"] = MEAN if row["n_reached"] == len(cell) else MEDIAN
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
    """Return the geometric mean of a column of `TO_TARGET`, or its median if a run missed."""
    values = cell[name].to_numpy(dtype=float, na_value=np.nan)
    outcome = cell["outcome"].to_numpy()
    names = (name, f"{name}_low", f"{name}_high")
    unknown = np.isnan(values)
    several = name == "time_to_target_s" and "cell" in cell and cell["cell"].nunique() > 1
    if unknown[outcome == "reached"].any() or several:
        return dict.fromkeys(names, np.nan)
    if (outcome == "reached").all() and (values > 0).all():
        logs = pd.Series(np.log(values))
        half = half_widths(pd.Series([logs.std()]), pd.Series([len(logs)])).iloc[0]
        ends = np.exp(logs.mean() + np.array([0.0, -half, half]))
        return dict(zip(names, ends.tolist(), strict=True))
    bound = cell.reindex(columns=[_BOUNDS[name]]).to_numpy(dtype=float, na_value=np.nan)[:, 0]
    if name == "samples_to_target":
        bound = bound * cell["global_batch_size"].to_numpy(dtype=float)
    bound = np.where(outcome == "diverged", np.inf, np.nan_to_num(bound))
    low, high = np.where(unknown, bound, values), np.where(unknown, np.inf, values)
    median: Estimate = median_with_infinity(low, high)
    return dict(zip(names, (median.value, median.low, median.high), strict=True))
