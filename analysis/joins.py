"""Rows of steps and evaluations, joined to the runs that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

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
    changes = np.ones(len(rows), dtype=bool)
    changes[1:] = False
    for name in _KEYS:
        codes = _codes(rows[name])
        changes[1:] |= codes[1:] != codes[:-1]
    starts = np.flatnonzero(changes)
    lengths = np.diff(starts, append=len(rows))
    place = {key: position for position, key in enumerate(_keys(runs))}
    run = np.array([place.get(key, -1) for key in _keys(rows.iloc[starts])], dtype=np.int64)
    of_rows = np.repeat(run, lengths)
    known = of_rows >= 0
    selected = {
        name: rows[name].array[known].to_numpy(dtype=float, na_value=np.nan) for name in columns
    }
    return pd.DataFrame({"run": of_rows[known], **selected}, copy=False)


def _codes(column: pd.Series[str]) -> NDArray[np.integer]:
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.cat.codes.to_numpy()
    codes, _ = pd.factorize(column)
    return codes


def _keys(table: pd.DataFrame) -> Iterator[tuple[object, ...]]:
    # Plain objects: taking texts one by one out of a column of texts takes many times longer.
    return zip(*(table[name].to_numpy(dtype=object) for name in _KEYS), strict=True)
