"""Columns that a table may lack, and rows of steps and evaluations joined to their runs.

Rows of one run lie together, so only the first row of each stretch is looked up by its keys:
comparing millions of texts to join them takes many times longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

_KEYS = ["sweep_dir", "run_id"]


def column_of(table: pd.DataFrame, name: str) -> pd.Series[Any]:
    """Return a column of a table; all is missing where it has none of that name."""
    return table[name] if name in table else pd.Series(np.nan, table.index, name=name)


def rows_of(runs: pd.DataFrame, rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Select columns of the rows of some runs as floats, with `run`, the run's position."""
    is_start = np.ones(len(rows), dtype=bool)
    is_start[1:] = False
    for name in _KEYS:
        column = rows[name]
        if isinstance(column.dtype, pd.CategoricalDtype):
            codes = column.cat.codes.to_numpy()
        else:
            codes, _ = pd.factorize(column)
        is_start[1:] |= codes[1:] != codes[:-1]
    starts = np.flatnonzero(is_start)
    lengths = np.diff(starts, append=len(rows))
    position_of_run = {key: position for position, key in enumerate(_keys(runs))}
    run_of_stretch = np.array(
        [position_of_run.get(key, -1) for key in _keys(rows.iloc[starts])], dtype=np.int64
    )
    run_of_row = np.repeat(run_of_stretch, lengths)
    is_selected = run_of_row >= 0
    selected = {
        name: rows[name].array[is_selected].to_numpy(dtype=float, na_value=np.nan)
        for name in columns
    }
    return pd.DataFrame({"run": run_of_row[is_selected], **selected}, copy=False)


def _keys(table: pd.DataFrame) -> Iterator[tuple[object, ...]]:
    # Plain objects: taking texts one by one out of a column of texts takes many times longer.
    return zip(*(table[name].to_numpy(dtype=object) for name in _KEYS), strict=True)
