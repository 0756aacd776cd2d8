"""Rows of steps and evaluations, joined to the runs that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

__all__ = ["chunks_of", "rows_of"]

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
    starts, lengths, run = _stretches(runs, rows)
    return _selected(rows, columns, starts, lengths, run)


def chunks_of(
    runs: pd.DataFrame, rows: pd.DataFrame, columns: Sequence[str], by: str, size: int = 2**19
) -> Iterator[pd.DataFrame]:
    """Select the rows of some runs, a part at a time, so that they never take much memory.

    Parameters
    ----------
    runs, rows, columns
        As for `rows_of`.
    by : str
        Column of `runs`: those that agree in it are in one part.
    size : int
        Rows of a part, more or less.

    Yields
    ------
    DataFrame
        As `rows_of` returns it; parts follow the order of `by`. There is one at least, which is
        empty where there are no rows.
    """
    starts, lengths, run = _stretches(runs, rows)
    number, _ = pd.factorize(runs[by], sort=True)
    group = number[run]
    order = np.argsort(group, kind="stable")
    starts, lengths, run, group = starts[order], lengths[order], run[order], group[order]
    totals = np.bincount(group, weights=lengths, minlength=int(number.max(initial=-1)) + 1)
    # A group belongs to the part that its last row falls into.
    part = (np.cumsum(totals) // size)[group]
    for chosen in np.unique(part) if len(part) else [0]:
        here = part == chosen
        yield _selected(rows, columns, starts[here], lengths[here], run[here])


def _stretches(
    runs: pd.DataFrame, rows: pd.DataFrame
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """First row, length and position in `runs` of each stretch of rows of these runs."""
    changes = np.ones(len(rows), dtype=bool)
    changes[1:] = False
    for name in _KEYS:
        codes = _codes(rows[name])
        changes[1:] |= codes[1:] != codes[:-1]
    starts = np.flatnonzero(changes)
    place = {key: position for position, key in enumerate(_keys(runs))}
    run = np.array([place.get(key, -1) for key in _keys(rows.iloc[starts])], dtype=np.int64)
    known = run >= 0
    return starts[known], np.diff(starts, append=len(rows))[known], run[known]


def _codes(column: pd.Series[str]) -> NDArray[np.integer]:
    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.cat.codes.to_numpy()
    codes, _ = pd.factorize(column)
    return codes


def _keys(table: pd.DataFrame) -> Iterator[tuple[object, ...]]:
    # Plain objects: taking texts one by one out of a column of texts takes many times longer.
    return zip(*(table[name].to_numpy(dtype=object) for name in _KEYS), strict=True)


def _selected(
    rows: pd.DataFrame,
    columns: Sequence[str],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    run: NDArray[np.int64],
) -> pd.DataFrame:
    # Positions count on within a stretch, and jump between stretches.
    before = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
    selected = {
        name: rows[name].take(positions).to_numpy(dtype=float, na_value=np.nan) for name in columns
    }
    return pd.DataFrame({"run": np.repeat(run, lengths), **selected}, copy=False)
