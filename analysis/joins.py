"""Rows of steps and evaluations, joined to the runs that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

__all__ = ["rows_of"]

_KEYS = ["sweep_dir", "run_id"]


def rows_of(runs: pd.DataFrame, rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Select the rows of some runs.

    Rows of one run lie together, so only the first row of each stretch is looked up by its keys:
    comparing millions of texts to join them takes many times longer.

    Parameters
    ----------
    runs : DataFrame
        One row a run, with `sweep_dir` and `run_id`, which together are unique.
    rows : DataFrame
        With `sweep_dir`, `run_id` and the columns wanted.
    columns : sequence of str
        Numeric columns to keep; they become plain floats, NaN where missing.

    Returns
    -------
    DataFrame
        The columns, and `run`, the position of the run in `runs`; in the order of `rows`.
    """
    starts = np.zeros(len(rows), dtype=bool)
    for name in _KEYS:
        starts |= (rows[name] != rows[name].shift()).to_numpy(dtype=bool)
    numbered = runs[_KEYS].assign(run=np.arange(len(runs)))
    found = rows.loc[starts, _KEYS].merge(numbered, on=_KEYS, how="left")["run"]
    run = found.fillna(-1).to_numpy(dtype=np.int64)[np.cumsum(starts) - 1]
    kept = run >= 0
    selected = {name: rows[name].to_numpy(dtype=float, na_value=np.nan)[kept] for name in columns}
    return pd.DataFrame({"run": run[kept], **selected})
