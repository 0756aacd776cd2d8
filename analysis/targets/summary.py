"""Reaches summed up: one row a group, global batch, learning rate and target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import half_widths
from batchscape.analysis.joins import column_of
from batchscape.analysis.targets.censoring import median_with_infinity
from batchscape.analysis.targets.ends import TO_TARGET
from batchscape.analysis.targets.schema import OUTCOMES, check, with_defaults
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
    steps = reaches["steps_to_target"]
    missed = np.where(steps.isna(), "censored", "diverged")
    outcome = np.where(np.isfinite(steps), "reached", missed)
    defaults = {"group": 0, "seed": np.nan, "target_loss": np.nan, "outcome": outcome}
    reaches = with_defaults(reaches, defaults)
    is_reached = reaches["outcome"].eq("reached")
    steps = steps.where(is_reached)
    reaches = reaches.assign(steps_to_target=steps)
    samples = {"samples_to_target": steps * reaches["global_batch_size"]}
    reaches = with_defaults(reaches, dict.fromkeys(TO_TARGET, np.nan) | samples)
    low = steps.where(is_reached, 0.0).mask(reaches["outcome"].eq("diverged"), np.inf)
    ends = {"steps_low": low, "steps_high": steps.where(is_reached, np.inf)}
    return reaches if "steps_low" in reaches else reaches.assign(**ends)


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
    if column_of(reaches, "program_cut").isna().all():
        reaches = reaches.drop(columns="program_cut", errors="ignore")
    keys = [*reaches.filter(_KEYS).columns]
    name_of_run = "run_id" if "run_id" in reaches else "run"
    rows = []
    for values, cell in reaches.groupby(keys, dropna=False, sort=True, observed=True):
        counts = {f"n_{name}": int(cell["outcome"].eq(name).sum()) for name in OUTCOMES}
        row: dict[str, Any] = {**dict(zip(keys, values, strict=True)), "n": len(cell), **counts}
        row["statistic"] = MEAN if counts["n_reached"] == len(cell) else MEDIAN
        for name in TO_TARGET:
            row |= _figures(cell, name)
        if "crossing" in cell:
            row["crossing"] = cell["crossing"].iloc[0]
        if "interpolation_error" in cell:
            row["interpolation_error"] = cell["interpolation_error"].median()
        runs = column_of(cell, name_of_run).dropna().unique()
        rows.append({**row, "run_ids": " ".join(sorted(map(str, runs)))})
    order = ["group", "target_loss"]
    return pd.DataFrame(rows).sort_values(order, ascending=[True, False], ignore_index=True)


def _figures(cell: pd.DataFrame, name: str) -> dict[str, float]:
    """Return the geometric mean of a column of `TO_TARGET`, or its median if a run missed."""
    names = (name, f"{name}_low", f"{name}_high")
    values, is_reached = cell[name].astype(float), cell["outcome"].eq("reached")
    several = name == "time_to_target_s" and column_of(cell, "cell").nunique() > 1
    if several or (values.isna() & is_reached).any():
        return dict.fromkeys(names, np.nan)
    if is_reached.all() and (values > 0).all():
        logs = np.log(values)
        half = half_widths(pd.Series([logs.std()]), pd.Series([len(logs)])).iloc[0]
        ends = np.exp(logs.mean() + np.array([0.0, -half, half]))
        return dict(zip(names, ends.tolist(), strict=True))
    bound = column_of(cell, _BOUNDS[name]).astype(float)
    if name == "samples_to_target":
        bound *= cell["global_batch_size"]
    bound = bound.fillna(0.0).mask(cell["outcome"].eq("diverged"), np.inf)
    median = median_with_infinity(values.fillna(bound), values.fillna(np.inf))
    return dict(zip(names, median, strict=True))
