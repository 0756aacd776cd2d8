"""Writing how an attempt at a run ended: the run is sealed if the end is final, else left open.

Unfinished files of writers that were killed are removed here, too.
"""

from __future__ import annotations

import shutil
from contextlib import suppress

from batchscape.errors import DamageError, RecordError
from batchscape.record.disk import is_of_this_machine
from batchscape.record.files import read_json_lines, remove_if_possible
from batchscape.record.folder import TABLES, RunFolder, SweepFolder
from batchscape.record.instants import file_age_s
from batchscape.record.spec import RunSpec
from batchscape.record.state import decide, final_outcomes
from batchscape.record.status import RunEnd, RunStatus
from batchscape.record.tables import note_rows, seal

_UNFINISHED = "*.tmp"
"""Names that `record.files.write_atomically` and others give a file until it is complete."""
_DAY_S = 86400.0
"""Longer than a write of a file takes, and than clocks differ."""


def remove_dead_writes(sweep: SweepFolder) -> None:
    """Remove unfinished files beside the runs that are too old to be written by a launcher."""
    with suppress(OSError):
        for path in sweep.path.glob(_UNFINISHED):
            if file_age_s(path) > _DAY_S:
                path.unlink(missing_ok=True)


def remove_dead_writes_of_run(run: RunFolder) -> None:
    """Remove the unfinished files of a run that is claimed and has no process.

    Those of a mirror stay, which notes what it has sent. Where several machines may share the file
    system, which may have no locks, files younger than a day stay, too.
    """
    is_local = is_of_this_machine(run.path)
    with suppress(OSError):
        for folder in (run.path, run.checkpoints):
            for path in folder.glob(_UNFINISHED):
                is_of_mirror = path.name.startswith(f".{run.mirror.name}.")
                if not is_of_mirror and (is_local or file_age_s(path) > _DAY_S):
                    path.unlink(missing_ok=True)


def write_end(
    folder: RunFolder, status: RunStatus, run_end: RunEnd, ranks: int, *, ended_at: float
) -> None:
    """Write how the last attempt at a run ended. The caller holds the lock of the run.

    Parameters
    ----------
    folder : RunFolder
    status : RunStatus
        As the folder has it; the end is filled in.
    run_end : RunEnd
    ranks : int
        Data-parallel ranks of the run.
    ended_at : float
        In seconds since the epoch.

    Raises
    ------
    RecordError
        If the rows are damaged.
    OSError
        If it cannot be written.
    """
    status.note_end(run_end, ended_at)
    status.attempts[-1].from_optimizer_step = _steps_before(folder, len(status.attempts) - 1)
    if status.status.is_sealed:
        seal(folder, status, ranks)
        clear_away(folder)
    else:
        note_rows(folder, status, ranks)
        status.write(folder.status)


def seal_from_rows(spec: RunSpec, folder: RunFolder, status: RunStatus) -> bool:
    """Seal a run that was trained to its end, where only the seal could not be written.

    The caller holds the lock of the run. Some tables may be Parquet already; they are made again
    from the lines.

    Returns
    -------
    bool
        Whether the run is sealed now; False where its rows are damaged.

    Raises
    ------
    OSError
        If it cannot be written, still.
    """
    outcomes = final_outcomes(folder, spec.processes) or {}
    ended_at = max(outcome.at for outcome in outcomes.values())
    run_end = decide(len(outcomes), outcomes, {})
    try:
        write_end(folder, status, run_end, spec.geometry.data_parallel_size, ended_at=ended_at)
    except RecordError:
        return False
    return status.status.is_sealed


def clear_away(folder: RunFolder) -> None:
    """Remove from a sealed run what only an open one needs, and the unfinished files of its ranks.

    Those are rows as lines, states and outcomes, which a launcher that was killed right after
    the seal has left. The record loses nothing where they cannot be removed.
    """
    copies = folder.beginning, folder.beginning.with_name(f".{folder.beginning.name}")
    for states in (folder.checkpoints, *copies):
        shutil.rmtree(states, ignore_errors=True)
    remove_if_possible(*map(folder.lines, TABLES), *folder.outcomes())
    remove_dead_writes_of_run(folder)


def _steps_before(folder: RunFolder, attempt: int) -> int:
    """Return the optimizer steps done before an attempt, by the rows that it kept."""
    done = 0
    path = folder.lines("steps")
    for row in read_json_lines(path):
        try:
            written_by, step = int(row["attempt"]), int(row["optimizer_step"])
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{path} is damaged: a row lacks its attempt or optimizer step ({error!r})"
            raise DamageError(msg) from None
        if written_by == attempt:
            return step - 1
        done = step
    return done
