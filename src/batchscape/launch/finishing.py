"""Ending what a launcher began and could not: sealing a run, and clearing away what is sealed.

The launcher died before it sealed the run, or the disk was full. The rows and the outcomes of the
ranks are there, so that nothing has to be trained again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from batchscape.config import Command
from batchscape.errors import RecordError
from batchscape.launch.outcome import Outcome, decide
from batchscape.record.files import read_json_lines, remove_if_possible
from batchscape.record.folder import TABLES, RunFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus
from batchscape.record.tables import seal

__all__ = ["clear_away", "finish", "has_ended_well"]


def has_ended_well(spec: RunSpec, folder: RunFolder) -> bool:
    """Whether the ranks of the latest attempt agree on a final end, and their rows are whole."""
    outcomes = _outcomes(spec, folder)
    if outcomes is None or not decide(len(outcomes), outcomes, {}).status.is_sealed:
        return False
    try:
        done = _steps_in(folder.lines("steps"))
    except RecordError:
        return False
    return {outcome.optimizer_step for outcome in outcomes.values()} == {done}


def finish(spec: RunSpec, folder: RunFolder, status: RunStatus) -> bool:
    """Seal a run that has ended well, if it has.

    To be called with the lock of the run. A run that was cut short while it was sealed has some
    tables as Parquet already; they are made again from the lines.

    Parameters
    ----------
    spec : RunSpec
    folder : RunFolder
    status : RunStatus
        As it stands in the folder; it is filled in.

    Returns
    -------
    bool
        Whether the run is sealed now; else it has to go on.

    Raises
    ------
    OSError
        If it cannot be written, still.
    """
    if not status.attempts or not has_ended_well(spec, folder):
        return False
    outcomes = _outcomes(spec, folder) or {}
    verdict = decide(len(outcomes), outcomes, {})
    for table in TABLES:
        folder.parquet(table).unlink(missing_ok=True)
    attempt = status.attempts[-1]
    status.status = verdict.status
    status.stop_reason = verdict.stop_reason
    status.reason = attempt.reason = verdict.reason
    status.cause = attempt.cause = verdict.cause
    status.rank, status.phase = verdict.rank, verdict.phase
    attempt.status = str(verdict.status)
    attempt.ended_at = max(outcome.at for outcome in outcomes.values())
    attempt.from_optimizer_step = _steps_in(folder.lines("steps"), before=len(status.attempts) - 1)
    try:
        seal(folder, status, spec.geometry.data_parallel_size)
    except RecordError:
        return False
    clear_away(folder)
    return True


def clear_away(folder: RunFolder) -> None:
    """Remove from a sealed run what only one that goes on needs: rows, checkpoints, outcomes.

    A launcher that was killed right after the seal has left it. What cannot be removed takes
    nothing from the record.
    """
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    remove_if_possible(*map(folder.lines, TABLES), folder.notes, *folder.outcomes())


def _outcomes(spec: RunSpec, folder: RunFolder) -> Mapping[int, Outcome] | None:
    """Read what the ranks left; None where one left nothing, or nothing that can be read."""
    ranks = 1 if isinstance(spec.config.engine, Command) else spec.geometry.data_parallel_size
    paths = [folder.outcome(rank) for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        return None
    try:
        return {rank: Outcome.read(path) for rank, path in enumerate(paths)}
    except RecordError:
        return None


def _steps_in(path: Path, before: int | None = None) -> int:
    """Return the optimizer steps that rows tell of, of all attempts or of those before one."""
    done = 0
    for row in read_json_lines(path):
        if before is not None and row.get("attempt") == before:
            break
        done = row.get("optimizer_step", 0)
    return done
