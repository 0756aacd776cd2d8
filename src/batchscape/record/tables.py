"""Reading and sealing the tables of run folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from batchscape.errors import RecordError
from batchscape.record.columns import COLUMNS
from batchscape.record.files import read_json, read_json_lines, sha256_of
from batchscape.record.folder import TABLES, RunFolder, SweepFolder
from batchscape.record.status import RunStatus, Status, check_version
from batchscape.record.summary import SUMMARY, summarise

__all__ = ["Tables", "load", "read_table", "seal", "verify_seal"]


@dataclass(frozen=True)
class Tables:
    """All records of one or more sweeps, one tidy table a kind."""

    runs: pd.DataFrame
    """One row a run, rejected ones included: identity, status, settings, summary."""
    steps: pd.DataFrame
    """One row an optimizer step, with `run_id`."""
    evals: pd.DataFrame
    """One row an evaluation, with `run_id`."""
    ranks: pd.DataFrame
    """One row a rank and attempt, with `run_id`."""
    damaged: dict[str, str]
    """Run folders that could not be read, and why. They are in no table."""
    copies: dict[str, str] = field(default_factory=dict)
    """Run folders with the sealed content of another one, and which. Only that one is counted."""


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
        With exactly the columns of `record.columns`, missing ones filled with NA.

    Raises
    ------
    RecordError
        If the file is damaged.
    """
    sealed = folder.parquet(table)
    if sealed.exists():
        try:
            return pd.read_parquet(sealed)
        except (OSError, ValueError) as error:
            msg = f"{sealed} is damaged: {error}"
            raise RecordError(msg) from None
    rows = pd.DataFrame(list(read_json_lines(folder.lines(table))))
    typed = {name: column.dtype for name, column in COLUMNS[table].items()}
    try:
        return rows.reindex(columns=list(typed)).astype(typed)
    except (TypeError, ValueError) as error:
        msg = f"{folder.lines(table)} is damaged: {error}"
        raise RecordError(msg) from None


def seal(folder: RunFolder, status: RunStatus, data_parallel_size: int) -> None:
    """Turn the rows of an ended run into Parquet, write its summary and its seal.

    The status is written last: a crash before leaves the run open, and it is sealed again.

    Parameters
    ----------
    folder : RunFolder
    status : RunStatus
        The final status; its `summary` and `seal` are filled in.
    data_parallel_size : int
        Data-parallel ranks of the run.
    """
    tables = {table: read_table(folder, table) for table in TABLES}
    status.summary = summarise(**tables, data_parallel_size=data_parallel_size)
    status.seal = {}
    for table, rows in tables.items():
        path = folder.parquet(table)
        temporary = path.with_suffix(".tmp")
        rows.to_parquet(temporary, index=False)
        temporary.replace(path)
        status.seal[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    status.write(folder.status)
    for table in TABLES:
        folder.lines(table).unlink(missing_ok=True)


def verify_seal(folder: RunFolder, status: RunStatus) -> None:
    """Check that every sealed file is what was sealed.

    Raises
    ------
    RecordError
        If one is missing or differs.
    """
    for name, sealed in status.seal.items():
        path = folder.path / name
        if not path.exists() or sha256_of(path) != sealed["sha256"]:
            msg = f"{path} is missing or differs from what was sealed"
            raise RecordError(msg)


def load(*sweep_dirs: Path) -> Tables:
    """Read every run of one or more sweeps.

    Parameters
    ----------
    *sweep_dirs : Path
        Sweep folders, each with a `runs` folder. One that is named twice is read once, and a
        sealed run that was copied to another folder is counted once.

    Returns
    -------
    Tables

    Raises
    ------
    RecordError
        If a folder holds no runs.
    """
    runs: list[dict[str, Any]] = []
    parts: dict[str, list[pd.DataFrame]] = {table: [] for table in TABLES}
    damaged: dict[str, str] = {}
    copies: dict[str, str] = {}
    originals: dict[tuple[str, ...], str] = {}
    distinct: dict[Path, Path] = {}
    for sweep_dir in sweep_dirs:
        distinct.setdefault(sweep_dir.resolve(), sweep_dir)
    for sweep_dir in distinct.values():
        folders = SweepFolder(sweep_dir).run_folders()
        if not folders:
            msg = f"{sweep_dir} holds no runs; a sweep folder has a 'runs' folder with some in it"
            raise RecordError(msg)
        for folder in folders:
            try:
                status = RunStatus.read(folder.status)
                row = {"sweep_dir": str(sweep_dir), **_run_row(folder, status)}
                tables = {table: read_table(folder, table) for table in TABLES}
            except RecordError as error:
                damaged[str(folder.path)] = str(error)
                continue
            except KeyError as error:
                damaged[str(folder.path)] = f"{folder.config} is damaged: it lacks {error}"
                continue
            original = originals.setdefault(_content(row, status), str(folder.path))
            if original != str(folder.path):
                copies[str(folder.path)] = original
                continue
            runs.append(row)
            for table, rows in tables.items():
                if len(rows):
                    parts[table].append(rows.assign(run_id=row["run_id"], sweep_dir=str(sweep_dir)))
    joined = {
        table: pd.concat(found, ignore_index=True)
        if found
        else pd.DataFrame(columns=["run_id", "sweep_dir", *COLUMNS[table]])
        for table, found in parts.items()
    }
    return Tables(runs=pd.DataFrame(runs), damaged=damaged, copies=copies, **joined)


def _content(row: Mapping[str, Any], status: RunStatus) -> tuple[str, ...]:
    """Name what a run holds: equal for copies only, since no two trainings take equal times."""
    if not status.seal and status.status is not Status.REJECTED:
        return row["sweep_dir"], row["run_id"]
    digests = [sealed["sha256"] for _, sealed in sorted(status.seal.items())]
    return row["run_id"], str(status.status), str(status.reason), *digests


def _run_row(folder: RunFolder, status: RunStatus) -> dict[str, Any]:
    """Flatten what is known of one run into one row."""
    config = read_json(folder.config)
    check_version(folder.config, config)
    if status.seal:
        verify_seal(folder, status)
    row: dict[str, Any] = {
        "run_id": config["run_id"],
        "trajectory_id": config["trajectory_id"],
        "sweep_name": config["sweep_name"],
        "status": str(status.status),
        "stop_reason": None if status.stop_reason is None else str(status.stop_reason),
        "reason": status.reason,
        "rank": status.rank,
        "attempts": len(status.attempts),
    }
    settings = _flatten(config["config"])
    # A rejected cell has no solved geometry: it shows what was asked for.
    row |= config["geometry"] or {
        name: settings[f"batch.{name}"]
        for name in (
            "nodes",
            "devices_per_node",
            "data_parallel_size",
            "micro_batch_size",
            "gradient_accumulation_steps",
            "global_batch_size",
        )
    }
    resolved = dict(config["resolved"] or {})
    batches = [str(s["geometry"]["global_batch_size"]) for s in resolved.pop("stages", [])]
    row["ramp"] = "\u2192".join(batches) if len(batches) > 1 else None
    for name, value in resolved.items():
        # What was planned must not pass for what was done.
        row[f"planned_{name}" if name in SUMMARY else name] = value
    if folder.launch.exists():
        launch = read_json(folder.launch)
        launch.pop("rendezvous", None)  # a temporary path, gone when the run ends
        row |= _flatten(launch, "launch.")
    if folder.environment.exists():
        row |= _flatten(read_json(folder.environment), "environment.")
    if config["data"] is not None:
        row["data.manifest_hash"] = config["data"]["manifest_hash"]
        row["task"] = config["data"]["task"]
    row |= {name: status.summary.get(name) for name in SUMMARY}
    # What was resolved, such as a seed or the sweep's name, stays before what was asked for.
    kept = {"sweep_dir", *row}
    return row | {name: value for name, value in settings.items() if name not in kept}


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
