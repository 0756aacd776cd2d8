"""Equality of tables bit for bit, which `check_exact=True` of pandas is not on nullable columns."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.extensions import ExtensionArray

from batchscape.record.files import read_json_lines

__all__ = ["assert_same_rows"]


def assert_same_rows(found: pd.DataFrame | Path, expected: pd.DataFrame | Path) -> None:
    """Assert that two tables hold the same columns, types, values and missing values, bit for bit.

    The names of the rows (the index) are not compared.

    Parameters
    ----------
    found, expected : DataFrame or Path
        A path leads to Parquet (`.parquet`) or to JSON lines (`.jsonl`).
    """
    a, b = _table(found), _table(expected)
    assert list(a.columns) == list(b.columns)
    assert len(a) == len(b), f"{len(a)} rows, not {len(b)}"
    for name in a.columns:
        assert a[name].dtype == b[name].dtype, f"{name}: {a[name].dtype}, not {b[name].dtype}"
        ours, theirs = _cells(a[name]), _cells(b[name])
        differing = [row for row in range(len(a)) if ours[row] != theirs[row]]
        assert not differing, (
            f"{name} differs in {len(differing)} of {len(a)} rows, first in row {differing[0]}: "
            f"{a[name].iloc[differing[0]]}, not {b[name].iloc[differing[0]]}"
        )


def _table(source: pd.DataFrame | Path) -> pd.DataFrame:
    if isinstance(source, pd.DataFrame):
        return source
    if source.suffix == ".parquet":
        return pd.read_parquet(source)
    # As objects: pandas would turn a missing integer into a float.
    return pd.DataFrame(list(read_json_lines(source)), dtype=object)


def _cells(column: pd.Series) -> list[bytes | None]:
    """Return the bytes of each value; None where it is missing."""
    array = column.array
    kind = getattr(column.dtype, "numpy_dtype", column.dtype)
    if isinstance(kind, np.dtype) and kind.kind != "O":
        missing = _mask(array, len(column))
        values = array.to_numpy(dtype=kind, na_value=kind.type(0)) if missing.any() else array
        raw = np.ascontiguousarray(np.asarray(values, dtype=kind))
        width = kind.itemsize
        content = raw.tobytes()
        return [
            None if gone else content[row * width : (row + 1) * width]
            for row, gone in enumerate(missing)
        ]
    return [_bits(value) for value in column]


def _mask(array: ExtensionArray, rows: int) -> np.ndarray:
    """Where a nullable column has no value; a NaN of a plain column is a value."""
    if isinstance(array, pd.arrays.NumpyExtensionArray):
        return np.zeros(rows, dtype=bool)
    return np.asarray(array.isna(), dtype=bool)


def _bits(value: Any) -> bytes | None:
    if isinstance(value, float):
        return b"float " + struct.pack("<d", value)
    if value is None or value is pd.NA:
        return None
    return f"{type(value).__name__} {value!r}".encode()
