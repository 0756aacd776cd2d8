"""Columns that the rows of run after run are appended to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["PLAIN", "GrowingColumn", "GrowingTable"]

_BLOCK = 2**18
"""Rows of a block: large enough that the system takes its memory back at once."""
_WAITING_ROWS = 2**16
_WAITING_RUNS = 256
"""What is appended at once: a call for every column of every run takes longer than the copying."""
_ARROW = {"Int64": pa.int64(), "Float64": pa.float64(), "boolean": pa.bool_()}
PLAIN: dict[str, type[np.generic]] = {
    "Int64": np.int64,
    "Float64": np.float64,
    "boolean": np.bool_,
}
"""Plain numbers behind the types of columns; the others are texts."""


class GrowingColumn:
    """Blocks of plain values and of what is missing; nothing is moved when rows are added.

    Tens of thousands of small pieces, kept until the end, would take several times the memory.

    Parameters
    ----------
    dtype : str
        As in `record.columns`.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.size = 0
        self.has_missing = False
        self._values: list[NDArray[Any]] = []
        self._missing: list[NDArray[np.bool_]] = []
        self._texts: list[str | None] = []

    @property
    def is_text(self) -> bool:
        """Whether the values are texts."""
        return self.dtype not in PLAIN

    def append(self, rows: pa.ChunkedArray | None, count: int) -> None:
        """Add the rows of one run; None: it has no such column, and all are missing.

        Raises
        ------
        pyarrow.ArrowInvalid
            If the values are of another kind.
        """
        if self.is_text:
            self._texts += [None] * count if rows is None else rows.cast(pa.string()).to_pylist()
            self.size += count
            return
        plain, kind = PLAIN[self.dtype], _ARROW[self.dtype]
        if rows is None:
            self._write(np.zeros(count, plain), np.ones(count, np.bool_))
            return
        for chunk in rows.chunks:
            values = chunk if chunk.type == kind else chunk.cast(kind)
            missing = None
            if values.null_count:
                missing = values.is_null().to_numpy(zero_copy_only=False)
                values = values.fill_null(False if kind == pa.bool_() else 0)
            self._write(values.to_numpy(zero_copy_only=False), missing)

    def values(self) -> list[NDArray[Any]]:
        """Give the values away, in blocks; what is missing is zero."""
        blocks, self._values = self._trimmed(self._values), []
        return blocks

    def missing(self) -> list[NDArray[np.bool_]]:
        """Give away what is missing, in blocks."""
        blocks, self._missing = self._trimmed(self._missing), []
        return blocks

    def texts(self) -> list[str | None]:
        """Return the texts."""
        return self._texts

    def _write(self, values: NDArray[Any], missing: NDArray[np.bool_] | None) -> None:
        begin = 0
        while begin < len(values):
            place = self.size % _BLOCK
            if place == 0:
                self._values.append(np.empty(_BLOCK, values.dtype))
                # Zeros that nobody writes to take no memory.
                self._missing.append(np.zeros(_BLOCK, np.bool_))
            end = min(begin + _BLOCK - place, len(values))
            self._values[-1][place : place + end - begin] = values[begin:end]
            if missing is not None:
                self.has_missing = True
                self._missing[-1][place : place + end - begin] = missing[begin:end]
            self.size += end - begin
            begin = end

    def _trimmed(self, blocks: list[NDArray[Any]]) -> list[NDArray[Any]]:
        last = self.size % _BLOCK
        return [*blocks[:-1], blocks[-1][: last or _BLOCK]] if blocks else []


class GrowingTable:
    """Columns of one table, which grow together.

    Parameters
    ----------
    dtypes : mapping of str to str
        As in `record.columns`, by name of the column.
    """

    def __init__(self, dtypes: Mapping[str, str]) -> None:
        self._columns = {name: GrowingColumn(dtype) for name, dtype in dtypes.items()}
        self._waiting: list[pa.Table] = []
        self._count = 0

    def append(self, rows: pa.Table | None, count: int) -> None:
        """Add the rows of one run; None: it has no such columns, and all are missing.

        Raises
        ------
        pyarrow.ArrowInvalid
            If values are of another kind.
        """
        if rows is None:
            rows = pa.table({})
        if self._waiting and not self._waiting[0].schema.equals(rows.schema):
            self._append_waiting()
        self._waiting.append(rows)
        self._count += count
        if self._count >= _WAITING_ROWS or len(self._waiting) >= _WAITING_RUNS:
            self._append_waiting()

    def columns(self) -> dict[str, GrowingColumn]:
        """Return the columns, with all rows."""
        self._append_waiting()
        return self._columns

    def _append_waiting(self) -> None:
        if not self._waiting:
            return
        rows = pa.concat_tables(self._waiting).combine_chunks()
        known = set(rows.column_names)
        for name, column in self._columns.items():
            column.append(rows.column(name) if name in known else None, self._count)
        self._waiting, self._count = [], 0
