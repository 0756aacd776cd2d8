"""Reading run folders into columns: Polars scans what is sealed, lines are read one by one."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
from pandas.api.extensions import ExtensionArray

from batchscape.errors import DamageError, RecordError
from batchscape.record.columns import COLUMNS
from batchscape.record.copies import Content, content_of_run
from batchscape.record.files import read_json_lines
from batchscape.record.folder import RunFolder
from batchscape.record.run_row import run_row
from batchscape.record.status import RunStatus, Status

if TYPE_CHECKING:
    # Its runtime takes time and memory that trainer and launcher need not spend: it is imported
    # where sweeps are read.
    import polars as pl

__all__ = ["Columns", "RunRead", "Wanted", "check_rows", "open_rows", "read_folders"]

Wanted = Mapping[str, Sequence[str]]
"""Columns to read, by table."""

Columns = dict[str, dict[str, ExtensionArray]]
"""Whole columns, by table and name."""

_Source = bytes | pd.DataFrame
"""Rows of one run: the content of a sealed file, or its lines."""

_RUNS_A_SCAN = 500
"""Run folders whose files are in memory at once."""


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
    damage: str | None = None
    """Why the folder could not be read."""


def read_folders(folders: Sequence[RunFolder], wanted: Wanted) -> tuple[list[RunRead], Columns]:
    """Read run folders; a damaged one is named, and adds no rows.

    Parameters
    ----------
    folders : sequence of RunFolder
    wanted : mapping of str to sequence of str
        Columns to read, for every table.

    Returns
    -------
    runs : list of RunRead
        In the order of the folders.
    columns : mapping
        Rows of all of the runs, in the same order.
    """
    import polars as pl

    types = {"Int64": pl.Int64, "Float64": pl.Float64, "boolean": pl.Boolean, "string": pl.String}
    schemas = {
        table: pl.Schema({name: types[COLUMNS[table][name].dtype] for name in names})
        for table, names in wanted.items()
    }
    runs: list[RunRead] = []
    parts = {table: [schema.to_frame()] for table, schema in schemas.items()}
    for start in range(0, len(folders), _RUNS_A_SCAN):
        read, frames = _read_some(folders[start : start + _RUNS_A_SCAN], schemas)
        runs += read
        for table, frame in frames.items():
            parts[table].append(frame)
    return runs, {table: _columns(table, pl.concat(parts.pop(table))) for table in wanted}


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


def _read_some(
    folders: Sequence[RunFolder], schemas: Mapping[str, pl.Schema]
) -> tuple[list[RunRead], dict[str, pl.DataFrame]]:
    """Read folders with one scan a table; where it fails, the folder that it fails for is found."""
    import polars as pl

    runs: list[RunRead] = []
    sources: dict[str, list[_Source]] = {table: [] for table in schemas}
    for folder in folders:
        try:
            run, found = _read_twice(folder, schemas)
        except RecordError as error:
            runs.append(RunRead(str(folder.path), damage=str(error)))
            continue
        runs.append(run)
        for table, source in found.items():
            sources[table].append(source)
    try:
        return runs, {
            table: _scanned(table, sources[table], sum(run.counts.get(table, 0) for run in runs), s)
            for table, s in schemas.items()
        }
    except DamageError as error:
        if len(folders) == 1:
            nothing = {table: schema.to_frame() for table, schema in schemas.items()}
            return [RunRead(str(folders[0].path), damage=f"{folders[0].path}/{error}")], nothing
    half = len(folders) // 2
    first, second = (_read_some(part, schemas) for part in (folders[:half], folders[half:]))
    return first[0] + second[0], {
        table: pl.concat([first[1][table], second[1][table]]) for table in schemas
    }


def _scanned(table: str, sources: Sequence[_Source], count: int, schema: pl.Schema) -> pl.DataFrame:
    """Join the rows of runs, in their order; there have to be as many as were counted.

    Raises
    ------
    DamageError
        If a file is not what its seal promises, or its columns are of other types.
    """
    import polars as pl

    parts = [schema.to_frame()]
    try:
        for is_sealed, some in groupby(sources, key=lambda source: isinstance(source, bytes)):
            if is_sealed:
                files = cast("list[bytes]", list(some))
                scan = pl.scan_parquet(
                    files, schema=schema, missing_columns="insert", extra_columns="ignore"
                )
                parts.append(scan.collect())
            else:
                opened = cast("list[pd.DataFrame]", list(some))
                parts += [pl.from_pandas(rows[list(schema)]).cast(schema) for rows in opened]
    except pl.exceptions.PolarsError as error:
        msg = f"{table}.parquet is damaged: {error}"
        raise DamageError(msg) from None
    rows = pl.concat(parts)
    if len(rows) != count:
        msg = f"{table}.parquet is damaged: it holds {len(rows)} rows, and {count} were sealed"
        raise DamageError(msg)
    return rows


def _columns(table: str, rows: pl.DataFrame) -> dict[str, ExtensionArray]:
    """Hand columns over to pandas, one after the other: each is let go of as it is copied."""
    return {
        name: pd.api.types.pandas_dtype(COLUMNS[table][name].dtype).__from_arrow__(
            rows.drop_in_place(name).to_arrow()
        )
        for name in rows.columns
    }


def _read_twice(folder: RunFolder, wanted: Wanted) -> tuple[RunRead, dict[str, _Source]]:
    """Read a folder, and again where its launcher may have gone on with it meanwhile."""
    with contextlib.suppress(DamageError):
        return _read(folder, wanted)
    return _read(folder, wanted)


def _read(folder: RunFolder, wanted: Wanted) -> tuple[RunRead, dict[str, _Source]]:
    status = RunStatus.read(folder.status)
    row = run_row(folder, status)
    run = RunRead(str(folder.path), row, content_of_run(row["run_id"], status))
    sealed = {name: _verified(folder, name, status) for name in status.seal}
    sources: dict[str, _Source] = {}
    for table in (table for table, names in wanted.items() if names):
        content = sealed.get(folder.parquet(table).name)
        if content is not None:
            run.counts[table] = status.rows.get(table, 0)
            sources[table] = content
            continue
        rows = open_rows(folder, table) if folder.lines(table).exists() else None
        run.counts[table] = 0 if rows is None else len(rows)
        check_rows(folder, status, table, run.counts[table])
        if rows is not None:
            sources[table] = rows
    return run, sources


def _verified(folder: RunFolder, name: str, status: RunStatus) -> bytes:
    """Read a file that must be what was sealed."""
    path = folder.path / name
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    if hashlib.sha256(content).hexdigest() != status.seal[name]["sha256"]:
        msg = f"{path} is missing or differs from what was sealed"
        raise DamageError(msg)
    return content
