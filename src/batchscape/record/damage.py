"""Finding out whether a run folder is what was written, and setting aside one that is not."""

from __future__ import annotations

import time
from pathlib import Path

from batchscape.errors import DamageError
from batchscape.record.files import read_json, read_json_lines, write_json
from batchscape.record.folder import TABLES, RunFolder, SweepFolder
from batchscape.record.gradient_sketch import read_sketch
from batchscape.record.reading import check_rows
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import verify_seal

__all__ = ["damage_of", "set_aside"]

_NOTE = "damage.json"


def damage_of(folder: RunFolder) -> str | None:
    """Say what is damaged of all that a launcher or a report would read of a run.

    Checkpoints are not looked at: each is verified when it is loaded, and an older one taken where
    the newest is damaged.

    Parameters
    ----------
    folder : RunFolder

    Returns
    -------
    str or None
        None for a folder that is whole, or that nothing was written to.

    Raises
    ------
    RecordError
        If a file cannot be read for another reason: its format, or what the disk says.
    """
    try:
        _check(folder)
    except DamageError as error:
        return str(error)
    return None


def _check(folder: RunFolder) -> None:
    if not folder.status.exists():
        if folder.launch.exists():
            msg = f"{folder.status} is missing"
            raise DamageError(msg)
        return  # a launcher died while it made the folder
    status = RunStatus.read(folder.status)
    if status.status is Status.REJECTED:
        read_json(folder.config)
        return
    spec = RunSpec.read(folder.config)
    if spec.run_id != folder.path.name:
        msg = f"{folder.config} is damaged: it is of run {spec.run_id}"
        raise DamageError(msg)
    # Not the mirror's notes: a training is not repeated because they are damaged.
    for path in folder.beside:
        if path.exists() or path.name in status.files:
            read_json(path)
    if not status.status.is_sealed:
        _check_open(folder, status)
        return
    for table in TABLES:
        if folder.parquet(table).name not in status.seal:
            msg = f"{folder.status} is damaged: the run is {status.status}, and {table} not sealed"
            raise DamageError(msg)
    verify_seal(folder, status)


def _check_open(folder: RunFolder, status: RunStatus) -> None:
    for table in TABLES:
        path, found = folder.lines(table), 0
        for found, row in enumerate(read_json_lines(path), start=1):
            if table == "steps" and not {"attempt", "optimizer_step"} <= row.keys():
                msg = f"{path} is damaged: row {found} lacks its attempt or optimizer step"
                raise DamageError(msg)
        check_rows(folder, status, table, found)
    read_sketch(folder)


def set_aside(sweep: SweepFolder, folder: RunFolder, reason: str) -> Path:
    """Move a damaged run folder to where no reader takes it for a run; nothing is deleted.

    Parameters
    ----------
    sweep : SweepFolder
    folder : RunFolder
        Of that sweep.
    reason : str
        What is damaged; it is written into the folder, as `damage.json`.

    Returns
    -------
    Path
        Where it is now: `damaged/<run_id>-<n>` in the sweep folder.

    Raises
    ------
    OSError
        If it cannot be moved.
    """
    sweep.damaged.mkdir(exist_ok=True)
    number = 1
    while (place := sweep.damaged / f"{folder.path.name}-{number}").exists():
        number += 1
    folder.path.rename(place)
    write_json(
        place / _NOTE, {"run_id": folder.path.name, "reason": reason, "set_aside_at": time.time()}
    )
    return place
