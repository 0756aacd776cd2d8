"""The best of what was measured around the trials of a search, with its neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import half_widths

__all__ = ["best_measured"]


def best_measured(
    measured: pd.DataFrame, keys: Sequence[str], objectives: Sequence[str]
) -> pd.DataFrame:
    """Return the point of each study with the least mean, or each one where there is no order.

    Parameters
    ----------
    measured : DataFrame
        As `read_measured` returns it, a row a run.
    keys : sequence of str
        What was searched.
    objectives : sequence of str
        One; of two every point is returned, for each is a member of the front.

    Returns
    -------
    DataFrame
        `study` and `keys`; by objective its mean over seeds, and the half-width of its interval as
        `<objective>_ci95`; `n`, the number of seeds, and `runs`, apart by blanks. For each key of
        which several values were measured, `<key>_below` and `<key>_above`, the values next to the
        best with all else as there (NaN: there is none), and their means, `<key>_below_mean` and
        `<key>_above_mean`. A study without a result, or not all of its runs, is left out.
    """
    groups = measured.groupby(["study", *keys], sort=False)
    points = pd.DataFrame({name: groups[name].agg(_mean) for name in objectives})
    points["n"] = groups.size()
    for name in objectives:
        points[f"{name}_ci95"] = half_widths(groups[name].agg(_sd), points["n"])
    points["runs"] = groups["run"].agg(lambda own: " ".join(own.dropna()))
    points = points.reset_index()
    if len(objectives) > 1:
        return points[points[list(objectives)].map(math.isfinite).all(axis=1)]
    (objective,) = objectives
    several = [key for key in keys if measured.groupby("study")[key].nunique().max() > 1]
    rows = []
    for _, own in points.groupby("study", sort=False):
        if own[objective].isna().any() or not np.isfinite(own[objective]).any():
            continue
        best = own.sort_values(objective, kind="stable").iloc[0]
        row = best.to_dict()
        for key in several:
            others = [other for other in keys if other != key]
            line = own[own[others].eq(best[others]).all(axis=1)].sort_values(key)
            values = [np.nan, *line[key], np.nan]
            means = [np.nan, *line[objective], np.nan]
            place = values.index(best[key])
            for side, beside in (("below", place - 1), ("above", place + 1)):
                row[f"{key}_{side}"] = values[beside]
                row[f"{key}_{side}_mean"] = means[beside]
        rows.append(row)
    return pd.DataFrame(rows)


def _mean(values: pd.Series[float]) -> float:
    return float(values.mean(skipna=False))


def _sd(values: pd.Series[float]) -> float:
    return float(values.std()) if np.isfinite(values).all() else float("nan")
