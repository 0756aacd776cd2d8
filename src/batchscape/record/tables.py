"""Reading and sealing the tables of run folders."""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from batchscape.errors import DamageError, RecordError
from batchscape.record.disk import is_of_this_machine
from batchscape.record.figures import COLUMNS, OF_TOKENS
from batchscape.record.files import read_json, read_sealed, write_atomically
from batchscape.record.folder import TABLES, RunFolder, SweepFolder, no_runs
from batchscape.record.instants import file_age_s
from batchscape.record.reading import RunRead, open_rows, read_folders
from batchscape.record.status import Attempt, RunStatus, StopReason
from batchscape.record.summary import counts_tokens, summarise

_UNFINISHED = "*.tmp"
"""Names that `record.files.write_atomically` and others give a file until it is complete."""
_RUN_COLUMNS = ("run_id", "sweep_dir")
_DAY_S = 86400.0
"""Longer than a write of a file takes, and than clocks differ."""


@dataclass(frozen=True)
class Tables:
    """All records of one or more sweeps, as tidy tables."""

    runs: pd.DataFrame
    """One row a run, rejected ones included: identity, status, settings, summary."""
    steps: pd.DataFrame
    """One row an optimizer step, with `run_id`."""
    evals: pd.DataFrame
    """One row an evaluation, with `run_id`."""
    ranks: pd.DataFrame
    """One row a rank and attempt, with `run_id`."""
    attempts: pd.DataFrame
    """One row a start of a run's processes, as `Attempt`, with `run_id`."""
    damaged: dict[str, str]
    """Run folders that could not be read, and why. They are in no table."""


def read_table(folder: RunFolder, table: str) -> pd.DataFrame:
    """Read one table of one run, sealed or open.

    Parameters
    ----------
    folder : RunFolder
    table : str
        `steps`, `evals` or `ranks`.

    Returns
    -------
    DataFrame
        With exactly the columns of `record.figures`; missing ones are NA.

    Raises
    ------
    RecordError
        If the file is damaged.
    """
    sealed = folder.parquet(table)
    seal = RunStatus.read(folder.status).seal.get(sealed.name) if folder.status.exists() else None
    if seal is None:
        return open_rows(folder, table)
    content = read_sealed(sealed, seal)
    try:
        return pd.read_parquet(io.BytesIO(content))
    except (OSError, ValueError) as error:
        raise DamageError(f"{sealed} is damaged: {error}") from None


def seal(folder: RunFolder, status: RunStatus, data_parallel_size: int) -> None:
    """Write the rows of an ended run as Parquet, then its status with summary and seal.

    The status is written last: a crash before leaves the run open, and it is sealed again.

    Parameters
    ----------
    folder : RunFolder
    status : RunStatus
        The final status; its `summary` and `seal` are filled in.
    data_parallel_size : int
        Data-parallel ranks of the run.
    """
    tables = note_rows(folder, status, data_parallel_size)
    write_sealed(folder, status, tables)
    clear_away(folder)


def clear_away(folder: RunFolder) -> None:
    """Remove from a sealed run what only an open one needs, and the unfinished files of its ranks.

    Those are rows as lines, states and outcomes, which a launcher that was killed right after
    the seal has left. The record loses nothing where they cannot be removed.
    """
    copies = folder.beginning, folder.beginning.with_name(f".{folder.beginning.name}")
    for states in (folder.checkpoints, *copies):
        shutil.rmtree(states, ignore_errors=True)
    for path in (*map(folder.lines, TABLES), *folder.outcomes()):
        with suppress(OSError):
            path.unlink(missing_ok=True)
    remove_dead_writes(folder)


def remove_dead_writes(run: RunFolder) -> None:
    """Remove the unfinished files of a run that is claimed and has no process.

    Files of a mirror stay: they note what was sent. On a file system that several machines may
    share, files younger than a day stay too, as it may have no locks.
    """
    is_local = is_of_this_machine(run.path)
    with suppress(OSError):
        for folder in (run.path, run.checkpoints):
            for path in folder.glob(_UNFINISHED):
                is_of_mirror = path.name.startswith(f".{run.mirror.name}.")
                if not is_of_mirror and (is_local or file_age_s(path) > _DAY_S):
                    path.unlink(missing_ok=True)


def note_rows(
    folder: RunFolder, status: RunStatus, data_parallel_size: int
) -> dict[str, pd.DataFrame]:
    """Note in a status what the rows of its last attempt tell: the summary, and where it began.

    Parameters
    ----------
    folder : RunFolder
    status : RunStatus
        Its `summary` is filled in, and the first optimizer step of its last attempt.
    data_parallel_size : int
        Data-parallel ranks of the run.

    Returns
    -------
    dict of str to DataFrame
        The rows of each table.

    Raises
    ------
    DamageError
        If the rows are damaged.
    """
    tables = {table: open_rows(folder, table) for table in TABLES}
    try:
        status.summary = summarise(**tables, data_parallel_size=data_parallel_size)
        if not counts_tokens(read_json(folder.config)):
            status.summary |= dict.fromkeys(OF_TOKENS)
        if status.stop_reason is StopReason.TIMED:
            status.summary["final_loss"] = None  # its last steps are not the end of the budget
        if status.attempts:
            earlier_steps = _steps_before(tables["steps"], len(status.attempts) - 1)
            status.attempts[-1].from_optimizer_step = earlier_steps
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise DamageError(
            f"the rows of {folder.path} are damaged: they cannot be summarised ({error!r})"
        ) from error
    return tables


def _steps_before(steps: pd.DataFrame, attempt: int) -> int:
    """Return the optimizer steps done before an attempt, by the rows that it kept."""
    if steps[["attempt", "optimizer_step"]].isna().any(axis=None):
        raise ValueError("a row lacks its attempt or optimizer step")
    attempt_steps = steps.loc[steps["attempt"] == attempt, "optimizer_step"]
    if len(attempt_steps):
        return int(attempt_steps.iloc[0]) - 1
    return int(steps["optimizer_step"].iloc[-1]) if len(steps) else 0


def write_sealed(folder: RunFolder, status: RunStatus, tables: Mapping[str, pd.DataFrame]) -> None:
    """Write the tables of an ended run as Parquet, then its status with their seal.

    Parameters
    ----------
    folder : RunFolder
    status : RunStatus
        The final status with its summary; its `seal` and `rows` are filled in.
    tables : mapping of str to DataFrame
        Rows of each table, with the columns of `record.figures`.
    """
    status.seal = {}
    status.rows = {table: len(rows) for table, rows in tables.items()}
    for table, rows in tables.items():
        # Measured numbers repeat too seldom for dictionaries, and counters grow evenly: the file is
        # a quarter smaller than by pyarrow's choice, and is read in two thirds of the time.
        counters = [name for name, column in COLUMNS[table].items() if column.dtype == "Int64"]
        content = rows.to_parquet(
            index=False,
            use_dictionary=False,
            column_encoding=dict.fromkeys(counters, "DELTA_BINARY_PACKED"),
        )
        path = folder.parquet(table)
        write_atomically(path, content)
        status.seal[path.name] = _seal_of(content)
    if folder.gradient_sketch.exists():
        sketch = folder.gradient_sketch
        status.seal[sketch.name] = _seal_of(sketch.read_bytes())
    status.write(folder.status)


def verify_seal(folder: RunFolder, status: RunStatus) -> None:
    """Check the hash of every sealed file.

    Raises
    ------
    RecordError
        If one is missing or differs.
    """
    for name, sealed in status.seal.items():
        read_sealed(folder.path / name, sealed)


def _seal_of(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def load(*sweep_dirs: str | Path, columns: Mapping[str, Sequence[str]] | None = None) -> Tables:
    """Read every run of one or more sweeps.

    Parameters
    ----------
    *sweep_dirs : str or Path
        Sweep folders, each with a `runs` folder. A folder that is named twice is read once.
    columns : mapping of str to sequence of str, optional
        Columns to read of some tables, as in `{"steps": ["optimizer_step", "loss"], "ranks": []}`,
        for thousands of runs at a time; by default all. Sealed files are verified all the same.

    Returns
    -------
    Tables
        `run_id` and `sweep_dir` of steps, evals and ranks are categories, in order of `runs`.

    Raises
    ------
    RecordError
        If a folder holds no runs, a table has no such column, or a run folder is a copy of another.
    """
    columns_by_table = _column_names(columns or {})
    distinct: dict[Path, Path] = {}
    for sweep_dir in map(Path, sweep_dirs):
        distinct.setdefault(sweep_dir.resolve(), sweep_dir)
    folders: list[RunFolder] = []
    for sweep_dir in distinct.values():
        run_folders = SweepFolder(sweep_dir).run_folders()
        if not run_folders:
            raise RecordError(no_runs(sweep_dir))
        folders += run_folders
    runs, damaged, columns_read = read_folders(folders, columns_by_table)
    _refuse_copies(runs)
    # Categories take no more memory than numbers.
    names = {
        name: pd.Categorical(texts, pd.Index([*dict.fromkeys(texts)], dtype=str))
        for name in _RUN_COLUMNS
        for texts in [[run.row[name] for run in runs]]
    }
    return Tables(
        runs=pd.DataFrame([run.row for run in runs]),
        attempts=pd.DataFrame(
            [
                {**{name: run.row[name] for name in _RUN_COLUMNS}, **vars(attempt)}
                for run in runs
                for attempt in run.attempts
            ],
            columns=["sweep_dir", "run_id", *(attribute.name for attribute in fields(Attempt))],
        ),
        damaged=damaged,
        **{
            table: _join(columns_read[table], [run.counts.get(table, 0) for run in runs], names)
            for table in TABLES
        },
    )


def _refuse_copies(runs: Sequence[RunRead]) -> None:
    """Refuse two run folders of one run, which would count twice."""
    originals: dict[tuple[str, ...], str] = {}
    for run in runs:
        original = originals.setdefault(run.identity, run.folder)
        if original != run.folder:
            raise RecordError(
                f"{run.folder} is a copy of {original}, and would count twice: "
                "remove one of them, or leave its sweep folder out"
            )


def _column_names(columns: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    for table, names in columns.items():
        if table not in COLUMNS:
            raise RecordError(f"there is no table {table}, only {', '.join(COLUMNS)}")
        if unknown := sorted(set(names) - COLUMNS[table].keys()):
            raise RecordError(
                f"{table} has no column {', '.join(unknown)}, only {', '.join(COLUMNS[table])}"
            )
    return {table: tuple(columns.get(table, COLUMNS[table])) for table in TABLES}


def _join(
    columns: Mapping[str, pd.api.extensions.ExtensionArray],
    counts: Sequence[int],
    names: Mapping[str, pd.Categorical],
) -> pd.DataFrame:
    """Add the run and the sweep of each row, where runs have so many rows."""
    of_rows = {
        name: pd.Categorical.from_codes(np.repeat(texts.codes, counts), dtype=texts.dtype)
        for name, texts in names.items()
    }
    return pd.DataFrame({**columns, **of_rows}, copy=False)
