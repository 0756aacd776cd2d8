"""Reading run folders into columns: Polars scans sealed tables, open ones are read line by line.

The other files of a run become one flat row (`run_row`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from operator import index
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
from pandas.api.extensions import ExtensionArray

from batchscape.errors import DamageError, RecordError
from batchscape.record.disk import read_each
from batchscape.record.figures import COLUMNS, FIGURES
from batchscape.record.files import (
    read_json_if_there,
    read_json_lines,
    read_record,
    read_sealed,
)
from batchscape.record.folder import RunFolder
from batchscape.record.status import Attempt, RunStatus

if TYPE_CHECKING:
    # Importing Polars takes time and memory, which trainer and launcher save: it is imported where
    # sweeps are read.
    import polars as pl


_BATCH_SETTINGS = (
    "nodes",
    "data_parallel_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "global_batch_size",
)


def run_row(folder: RunFolder, status: RunStatus) -> dict[str, Any]:
    """Return the files of one run as one flat row.

    Parameters
    ----------
    folder : RunFolder
    status : RunStatus
        Content of its `status.json`.

    Returns
    -------
    dict
        Sweep, identity, status, geometry, resolved values, environment, summary and settings.

    Raises
    ------
    RecordError
        If a file of the folder is damaged or of another format version.
    """
    config = read_record(folder.config)
    try:
        return _row(folder, status, config)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        problem = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise DamageError(f"{folder.config} is damaged: {problem}") from None


def _row(folder: RunFolder, status: RunStatus, config: Mapping[str, Any]) -> dict[str, Any]:
    resolved, data = dict(config["resolved"] or {}), config["data"]
    stages = resolved.pop("stages", [])
    unpassed_settings = resolved.pop("not_passed", [])
    if not isinstance(config["run_id"], str):
        raise TypeError(f"run_id is {config['run_id']!r}, and must be a text")
    settings = _flatten(config["config"])
    row: dict[str, Any] = {
        "sweep_dir": str(folder.path.parent.parent),
        "run_id": config["run_id"],
        "trajectory_id": config["trajectory_id"],
        "sweep_name": config["sweep_name"],
        "status": str(status.status),
        "stop_reason": status.stop_reason and str(status.stop_reason),
        "reason": status.reason,
        "cause": status.cause and str(status.cause),
        "rank": status.rank,
        "attempts": len(status.attempts),
        "started_at": status.attempts[-1].started_at if status.attempts else None,
        # The limit has the name of figures of memory.
        "memory_limit_gib": settings.pop("device.memory_limit_gib", None),
    }
    # A rejected cell has no solved geometry: it shows the settings.
    row |= config["geometry"] or {
        "devices_per_node": None,
        **{name: settings[f"batch.{name}"] for name in _BATCH_SETTINGS},
    }
    # `index` refuses fractions.
    batches = [index(stage["geometry"]["global_batch_size"]) for stage in stages]
    samples = [stage["samples"] for stage in stages]
    # Each rate over the last stage's: ramps that differ only in that one are pooled over rates.
    rates = [stage["optimizer"]["learning_rate"] for stage in stages]
    factors = [f"{rate / rates[-1]:.6g}" for rate in rates]
    is_rate_known = rates and "optimizer.learning_rate" not in unpassed_settings
    row |= {
        "ramp": "\u2192".join(map(str, batches)) if len(batches) > 1 else None,
        # Ramps with the same batches may climb after different numbers of samples.
        "ramp_samples": ", ".join(map(str, samples[:-1])) or None,
        "ramp_learning_rate_factors": "\u2192".join(factors) if len(set(factors)) > 1 else None,
        # Of each stage: the samples before it, its global batch and its rate.
        "stages": tuple(zip(accumulate(samples, initial=0), batches, rates, strict=False)),
        # Peak of the schedule, scaling rules applied.
        "learning_rate": rates[-1] if is_rate_known else None,
    }
    # A planned value must not be taken for a measured one.
    row |= {f"planned_{name}" if name in FIGURES else name: resolved[name] for name in resolved}
    launch = read_json_if_there(folder.launch)
    launch.pop("rendezvous", None)  # a temporary path, gone when the run ends
    if not any(attempt.from_optimizer_step for attempt in status.attempts):
        launch.pop("begins", None)  # the state was damaged, and all steps were trained
    row |= _flatten(launch, "launch.")
    row |= _flatten(read_json_if_there(folder.environment), "environment.")
    with suppress(RecordError):  # a damaged prediction leaves the run valid
        row |= _flatten(read_json_if_there(folder.prediction), "predicted.")
    if data is not None:
        row |= {
            "data.manifest_hash": data["manifest_hash"],
            "task": data["task"],
            "train_samples": data.get("train_samples"),
        }
    row |= {name: status.summary.get(name) for name in FIGURES}
    # A setting that the program did not get must not look as if it had applied.
    settings |= dict.fromkeys(key for key in unpassed_settings if "." in key)
    row |= _flatten(read_json_if_there(folder.command).get("observed", {}), "observed.")
    # Resolved values, such as a seed or the name of the sweep, replace the settings.
    return row | {name: value for name, value in settings.items() if name not in row}


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict):  # a check for Mapping would take ten times as long
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


ColumnNames = Mapping[str, Sequence[str]]
"""Columns to read, by table."""

Columns = dict[str, dict[str, ExtensionArray]]
"""Whole columns, by table and name."""

_RUNS_A_SCAN = 250
"""Number of runs whose sealed files are scanned at once, while the next ones are read."""


@dataclass
class RunRead:
    """Content of one run folder."""

    folder: str
    row: dict[str, Any]
    """As `run_row` returns it."""
    attempts: list[Attempt]
    identity: tuple[str, ...]
    """Its name and the hashes of its tables, or its path while it is open: equal only for copies
    and links."""
    counts: dict[str, int]
    """Rows by table."""
    sources: dict[str, bytes | pd.DataFrame]
    """Source of its rows, by table, until they are scanned: the content of a sealed file, or the
    rows of the lines."""


def read_folders(
    folders: Sequence[RunFolder], columns_by_table: ColumnNames
) -> tuple[list[RunRead], dict[str, str], Columns]:
    """Read run folders; a damaged one is named, and adds no rows.

    Parameters
    ----------
    folders : sequence of RunFolder
    columns_by_table : mapping of str to sequence of str
        Names of the columns to read, for every table.

    Returns
    -------
    runs : list of RunRead
        Those that can be read, in the order of the folders.
    damaged : dict of str to str
        Why others cannot be read, by folder.
    columns : mapping
        Rows of all of the runs, in the same order.
    """
    import polars as pl

    schemas = {
        table: pl.Schema(
            # Polars calls types as pandas does, with a capital.
            {name: getattr(pl, COLUMNS[table][name].dtype.capitalize()) for name in column_names}
        )
        for table, column_names in columns_by_table.items()
    }
    runs: list[RunRead] = []
    damaged: dict[str, str] = {}
    scans: list[Future[dict[str, pl.DataFrame]]] = []
    with ThreadPoolExecutor(1) as executor:
        for start in range(0, len(folders), _RUNS_A_SCAN):
            scan_folders = folders[start : start + _RUNS_A_SCAN]
            read = partial(_read_with_retry, columns_by_table=columns_by_table)
            scan_runs = []
            for folder, run in zip(
                scan_folders, read_each(read, scan_folders, scan_folders[0].path), strict=True
            ):
                if isinstance(run, RunRead):
                    scan_runs.append(run)
                else:
                    damaged[str(folder.path)] = str(run)
            runs += scan_runs
            if scans:
                scans[-1].result()  # at most the files of two scans are in memory
            scans.append(executor.submit(_scan, scan_runs, schemas))
    # Nothing else may refer to the rows: each column is freed once it is copied.
    columns: Columns = {
        table: _to_pandas(
            table, pl.concat([schema.to_frame(), *(s.result().pop(table) for s in scans)])
        )
        for table, schema in schemas.items()
    }
    return runs, damaged, columns


def open_rows(folder: RunFolder, table: str) -> pd.DataFrame:
    """Read the lines of a table that is not sealed.

    Raises
    ------
    RecordError
        If the file is damaged.
    """
    rows = list(read_json_lines(folder.lines(table)))
    try:
        # A run is waited for while it is sealed: to make the frame first takes three times as long.
        # Of dtypes, pandas-stubs know literals only.
        return pd.DataFrame(
            {
                name: pd.array([row.get(name) for row in rows], dtype=column.dtype)  # type: ignore[call-overload]
                for name, column in COLUMNS[table].items()
            }
        )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise DamageError(f"{folder.lines(table)} is damaged: {error}") from None


def _scan(runs: Sequence[RunRead], schemas: Mapping[str, pl.Schema]) -> dict[str, pl.DataFrame]:
    """Scan each table once for all runs."""
    rows = {table: _rows(table, runs, schema) for table, schema in schemas.items()}
    for run in runs:
        run.sources.clear()
    return rows


def _rows(table: str, runs: Sequence[RunRead], schema: pl.Schema) -> pl.DataFrame:
    """Join the rows of runs, in their order.

    Raises
    ------
    DamageError
        If their number is not the sealed one, or columns have other types.
    """
    import polars as pl

    sources = [run.sources[table] for run in runs if table in run.sources]
    parts = [schema.to_frame()]
    try:
        for kind, group in groupby(sources, type):
            if kind is bytes:
                files = cast("list[bytes]", list(group))
                scan = pl.scan_parquet(
                    files, schema=schema, missing_columns="insert", extra_columns="ignore"
                )
                parts.append(scan.collect())
            else:
                lines = cast("list[pd.DataFrame]", list(group))
                parts += [pl.from_pandas(rows[list(schema)]).cast(schema) for rows in lines]
        rows, n_sealed = pl.concat(parts), sum(run.counts.get(table, 0) for run in runs)
        if len(rows) != n_sealed:
            raise pl.exceptions.ShapeError(f"it holds {len(rows)} rows, and {n_sealed} were sealed")
    except pl.exceptions.PolarsError as error:
        if len(runs) > 1:
            for run in runs:
                _rows(table, [run], schema)  # the error names the run that does not fit
        raise DamageError(f"{runs[0].folder}: {table}.parquet does not fit: {error}") from None
    return rows


def _to_pandas(table: str, rows: pl.DataFrame) -> dict[str, ExtensionArray]:
    """Copy columns to pandas, one after the other; each is freed once it is copied."""
    columns = {}
    for name in rows.columns:
        dtype: Any = pd.api.types.pandas_dtype(COLUMNS[table][name].dtype)
        columns[name] = dtype.__from_arrow__(rows.drop_in_place(name).to_arrow())
    return columns


def _read_with_retry(folder: RunFolder, columns_by_table: ColumnNames) -> RunRead | RecordError:
    """Read a folder; read again where its launcher may have written meanwhile."""
    for _ in range(2):
        try:
            return _read(folder, columns_by_table)
        except RecordError as error:
            problem = error
    return problem


def _read(folder: RunFolder, columns_by_table: ColumnNames) -> RunRead:
    status = RunStatus.read(folder.status)
    row = run_row(folder, status)
    hashes = [entry["sha256"] for _, entry in sorted(status.seal.items())]
    # A link to an open run is recognised, a copy of one is not.
    identity = (row["run_id"], *hashes) if hashes else (os.path.realpath(folder.path),)
    run = RunRead(str(folder.path), row, status.attempts, identity, {}, {})
    files = {name: read_sealed(folder.path / name, seal) for name, seal in status.seal.items()}
    for table in (table for table, column_names in columns_by_table.items() if column_names):
        sealed, lines = folder.parquet(table), folder.lines(table)
        if sealed.name in files:
            if table not in status.rows:
                raise DamageError(f"{folder.status} is damaged: it counts no rows of {table}")
            run.counts[table], run.sources[table] = status.rows[table], files[sealed.name]
        elif lines.exists():
            rows = open_rows(folder, table)
            run.counts[table], run.sources[table] = len(rows), rows
        elif sealed.exists():
            # The run may be being sealed, and is read again.
            raise DamageError(
                f"{sealed} has no seal in {folder.status.name}, and {lines.name} is missing; "
                f"delete {folder.path} to run it again"
            )
    return run
