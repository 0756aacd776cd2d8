"""How far the runs of a sweep are, read without loading their tables."""

from __future__ import annotations

import fcntl
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchscape.errors import DamageError, RecordError
from batchscape.record.checked import row_of
from batchscape.record.files import read_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.neighbours import no_runs
from batchscape.record.status import RunStatus, Status, check_version

__all__ = ["RunProgress", "has_launcher", "sweep_progress"]

_TAIL_BYTES = 1 << 16
"""What is read of the end of a table: enough for its last row."""


@dataclass(frozen=True)
class RunProgress:
    """One run, at a glance."""

    run_id: str
    status: str
    """A `Status`, or `damaged` where the folder cannot be read."""
    optimizer_step: int | None
    """Optimizer steps done."""
    optimizer_steps: int | None
    """Optimizer steps in all; None for a rejected cell."""
    loss: float | None
    """Latest training loss; of a sealed run, that of its last tenth."""
    age_s: float | None
    """Time since the last row of an open run."""
    reason: str | None


def sweep_progress(sweep: SweepFolder) -> list[RunProgress]:
    """Return the progress of every run of a sweep, by name.

    A run that claims to be running while no launcher is at work is shown as interrupted.

    Raises
    ------
    RecordError
        If the folder holds no runs.
    """
    folders = sweep.run_folders()
    if not folders:
        msg = no_runs(sweep.path)
        raise RecordError(msg)
    alive = has_launcher(sweep)
    found = []
    for folder in folders:
        try:
            found.append(_progress(folder, alive=alive))
        except RecordError as error:
            found.append(
                RunProgress(folder.path.name, "damaged", None, None, None, None, str(error))
            )
    return found


def has_launcher(sweep: SweepFolder) -> bool:
    """Whether a launcher holds the lock of a sweep."""
    try:
        descriptor = os.open(sweep.path / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _progress(folder: RunFolder, *, alive: bool) -> RunProgress:
    config = read_json(folder.config)
    check_version(folder.config, config)
    status = RunStatus.read(folder.status) if folder.status.exists() else RunStatus(Status.PENDING)
    state, reason = status.status, status.reason
    if state is Status.RUNNING and not alive:
        state, reason = Status.INTERRUPTED, "the launcher is gone; the same command goes on"
    row = _last_row(folder.lines("steps"))
    loss = status.summary.get("final_loss") if status.seal else row.get("loss")
    return RunProgress(
        run_id=folder.path.name,
        status=str(state),
        optimizer_step=(
            status.summary.get("optimizer_steps") if status.seal else row.get("optimizer_step")
        ),
        optimizer_steps=(config.get("resolved") or {}).get("optimizer_steps"),
        loss=None if loss is None or math.isnan(loss) else loss,
        age_s=_age_s(folder.lines("steps")) if row else None,
        reason=reason,
    )


def _age_s(path: Path) -> float:
    """Return the time since a file was written; none where the clock has gone back since."""
    return max(0.0, time.time() - path.stat().st_mtime)


def _last_row(path: Path) -> dict[str, Any]:
    """Return the last whole row of a file of JSON lines; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return {}
    # What follows the last newline is empty, or torn.
    whole = [line for line in lines[:-1] if line]
    try:
        row = row_of(whole[-1]) if whole else {}
    except ValueError as error:
        msg = f"{path} is damaged in its last line: {error}"
        raise DamageError(msg) from None
    return row
