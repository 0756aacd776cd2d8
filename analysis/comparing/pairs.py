"""What makes runs a pair, and how figures of pairs are put on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.cells import WHERE, Cells, plain_texts

__all__ = ["blocks_of", "joined", "labels_of", "logarithm", "values_of"]


def blocks_of(runs: pd.DataFrame, names: Sequence[str]) -> pd.Series[str]:
    """Name what makes runs a pair, by the values of some columns; those not there do not count."""
    return joined([plain_texts(runs[name]) for name in names if name in runs], "/", runs.index)


def joined(parts: Sequence[pd.Series[str]], separator: str, index: pd.Index) -> pd.Series[str]:
    """Join the texts of each row; empty where there are none."""
    # Plain objects: taking texts one by one out of a column of texts takes many times longer.
    columns = [part.to_numpy(dtype=object) for part in parts]
    rows = zip(*columns, strict=True) if parts else ([""] for _ in index)
    return pd.Series([separator.join(map(str, row)) for row in rows], index=index, dtype=str)


def labels_of(cells: Cells, runs: pd.DataFrame, names: Sequence[str]) -> pd.Series[str]:
    """Name each run by its cell's values of some settings, as in "model gpt, hardware H200"."""
    parts = [
        (name.replace("_", " ") if name in WHERE else cells.label_of(name))
        + " "
        + values_of(cells, runs, name)
        for name in names
    ]
    return joined(parts, ", ", runs.index)


def values_of(cells: Cells, runs: pd.DataFrame, name: str) -> pd.Series[str]:
    """Return a setting of each run as its cell has it."""
    return plain_texts(runs["cell"].map(cells.table[name]))


def logarithm(column: pd.Series[float]) -> pd.Series[float]:
    """Return the logarithm of a column; NaN where it is not above zero, or missing."""
    numbers = column.to_numpy(dtype=np.float64, na_value=np.nan)
    return pd.Series(np.log(np.where(numbers > 0, numbers, np.nan)), index=column.index)
