"""Reading run folders, one after the other, into columns."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchscape.errors import DamageError, RecordError
from batchscape.record.columns import COLUMNS
from batchscape.record.copies import Content, content_of_run
from batchscape.record.files import read_json_lines
from batchscape.record.folder import TABLES, RunFolder
from batchscape.record.growing import GrowingColumn, GrowingTable
from batchscape.record.run_row import run_row
from batchscape.record.status import RunStatus, Status

__all__ = [
    "Part",
    "Rows",
    "RunRead",
    "Shape",
    "Wanted",
    "check_rows",
    "open_rows",
    "read_folders",
    "signature_of",
]

Wanted = Mapping[str, Sequence[str]]
"""Columns to read, by table."""


_WATCHED = (
    "config.json",
    "status.json",
    "environment.json",
    "launch.json",
    "command.json",
    *(f"{table}.parquet" for table in TABLES),
    "gradient_sketch.npy",
)
"""Files of a run folder that its rows are made of, or that its seal names."""


@dataclass
class RunRead:
    """What was read of one run folder."""

    folder: str
    row: dict[str, Any] = field(default_factory=dict)
    """As `run_row` returns it; empty for a damaged folder."""
    content: Content | None = None
    """None where the run is open."""
    counts: dict[str, int] = field(default_factory=dict)
    """Rows by table."""
    signature: str = ""
    """State of the folder before it was read, see `signature_of`."""
    damage: str | None = None
    """Why the folder could not be read."""


@dataclass
class Part:
    """Some run folders, read."""

    runs: list[RunRead]
    columns: dict[str, dict[str, GrowingColumn]]
    """Rows of all of the runs, in their order, by table and name."""


class Shape(NamedTuple):
    """What is known of a column before its numbers."""

    size: int
    has_missing: bool
    texts: list[str | None]

    @classmethod
    def of(cls, column: GrowingColumn) -> Shape:
        """Describe a column that was read."""
        return cls(column.size, column.has_missing, column.texts())


class Rows(Protocol):
    """Rows that were read, or that lie ready to be."""

    runs: list[RunRead]
    shapes: dict[tuple[str, str], Shape]
    """By table and name of the column."""

    def fill(
        self, key: tuple[str, str], values: NDArray[Any], missing: NDArray[np.bool_] | None
    ) -> None:
        """Write the numbers of a column to where they belong; once, in order of the columns."""


def read_folders(paths: Sequence[Path], wanted: Wanted) -> Part:
    """Read run folders; a damaged one is named, and adds no rows.

    Parameters
    ----------
    paths : sequence of Path
        Run folders.
    wanted : mapping of str to sequence of str
        Columns to read, for every table.

    Returns
    -------
    Part
    """
    tables = {
        table: GrowingTable({name: COLUMNS[table][name].dtype for name in names})
        for table, names in wanted.items()
    }
    texts: dict[str, str] = {}
    runs = []
    for path in paths:
        try:
            run, rows = _read_twice(RunFolder(path), wanted)
        except RecordError as error:
            runs.append(RunRead(str(path), damage=str(error)))
            continue
        for table, (count, found) in rows.items():
            tables[table].append(found, count)
        # Thousands of runs repeat the same names and values: each is kept once.
        run.row = {
            texts.setdefault(name, name): texts.setdefault(value, value)
            if isinstance(value, str)
            else value
            for name, value in run.row.items()
        }
        runs.append(run)
    return Part(runs, {table: growing.columns() for table, growing in tables.items()})


def signature_of(folder: str) -> str:
    """Name the state of a run folder by sizes and times of change.

    Parameters
    ----------
    folder : str
    """
    parts = []
    for name in _WATCHED:
        try:
            # Tens of thousands of files: a path object for each takes several times as long.
            found = os.stat(f"{folder}/{name}")  # noqa: PTH116
        except OSError:
            parts.append("-")
        else:
            parts.append(f"{found.st_size}:{found.st_mtime_ns}")
    return " ".join(parts)


def open_rows(folder: RunFolder, table: str) -> pd.DataFrame:
    """Read the lines of a table that is not sealed.

    Raises
    ------
    RecordError
        If the file is damaged.
    """
    rows = pd.DataFrame(list(read_json_lines(folder.lines(table))))
    typed = {name: column.dtype for name, column in COLUMNS[table].items()}
    try:
        return rows.reindex(columns=list(typed)).astype(typed)
    except (TypeError, ValueError) as error:
        msg = f"{folder.lines(table)} is damaged: {error}"
        raise DamageError(msg) from None


def check_rows(folder: RunFolder, status: RunStatus, table: str, found: int) -> None:
    """Check that an open run that is at rest has all rows that its last attempt left.

    Raises
    ------
    DamageError
        If some are gone.
    """
    left = status.rows.get(table, 0)
    if found < left and status.status is not Status.RUNNING:
        msg = f"{folder.lines(table)} is damaged: {found} rows are left of {left}"
        raise DamageError(msg)


def _read_twice(
    folder: RunFolder, wanted: Wanted
) -> tuple[RunRead, dict[str, tuple[int, pa.Table | None]]]:
    """Read a folder, and again where its launcher may have gone on with it meanwhile."""
    with contextlib.suppress(DamageError):
        return _read(folder, wanted)
    return _read(folder, wanted)


def _read(
    folder: RunFolder, wanted: Wanted
) -> tuple[RunRead, dict[str, tuple[int, pa.Table | None]]]:
    signature = signature_of(str(folder.path))
    status = RunStatus.read(folder.status)
    row = run_row(folder, status)
    rows = {table: _rows(folder, table, status, names) for table, names in wanted.items()}
    tables = {folder.parquet(table).name for table in wanted}
    for name in sorted(status.seal.keys() - tables):
        _verified(folder.path, name, status)
    if not status.seal:
        for table, (count, read) in rows.items():
            if read is not None:
                check_rows(folder, status, table, count)
    content = content_of_run(row["run_id"], status)
    counts = {table: count for table, (count, _) in rows.items()}
    return RunRead(str(folder.path), row, content, counts, signature), rows


def _rows(
    folder: RunFolder, table: str, status: RunStatus, names: Sequence[str]
) -> tuple[int, pa.Table | None]:
    """Read some columns of a table, and its length; a sealed file is read and verified in one."""
    path = folder.parquet(table)
    content = _verified(folder.path, path.name, status)
    if not names:
        return 0, None
    if content is not None and path.name not in status.seal and folder.lines(table).exists():
        content = None  # a launcher died while it sealed the run: the lines are whole
    if content is None:
        rows = pa.Table.from_pandas(open_rows(folder, table), preserve_index=False)
        return rows.num_rows, rows
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        # Of the names, those that the file has not are left out.
        return file.metadata.num_rows, file.read(list(names), use_threads=False)
    except (OSError, ValueError) as error:  # errors of pyarrow are among them
        msg = f"{path} is damaged: {error}"
        raise DamageError(msg) from None


def _verified(folder: Path, name: str, status: RunStatus) -> bytes | None:
    """Read a file that must be what was sealed, if it was; None where there is none."""
    try:
        # Small files in great numbers: a buffer or a look beforehand would take as long again.
        with open(os.path.join(folder, name), "rb", buffering=0) as file:  # noqa: PTH118, PTH123
            content = file.read()
    except FileNotFoundError:
        content = None
    sealed = status.seal.get(name)
    if sealed is not None and (
        content is None or hashlib.sha256(content).hexdigest() != sealed["sha256"]
    ):
        msg = f"{folder / name} is missing or differs from what was sealed"
        raise DamageError(msg)
    return content
