"""What writers that were killed have left in a sweep folder: files that were never whole."""

from __future__ import annotations

import os
import re
from itertools import chain
from pathlib import Path

import psutil

from batchscape.record.claims import CLAIMS
from batchscape.record.disk import is_of_this_machine, read_each
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.instants import file_age_s

__all__ = ["remove_dead_writes"]

_BY_A_PROCESS = re.compile(r".+\.(\d+)\.tmp")
"""What `record.files.write_atomically` and others call a file until it is whole."""
_DAY_S = 86400.0
"""More than clocks differ by."""
_CLOCK_S = 60.0
"""More than the start of a process, counted from that of the machine, and the time of a file
differ by."""


def remove_dead_writes(place: SweepFolder | RunFolder) -> None:
    """Remove the unfinished files of processes that are gone.

    Those of living ones, of other launchers or a mirror, stay. Process ids mean nothing across
    containers, so that of a whole sweep the runs that somebody holds are passed over, and across
    machines: where several may share the file system, what is younger than a day stays. Where
    nothing can be removed, nothing is lost but room.

    Parameters
    ----------
    place : SweepFolder or RunFolder
        A sweep with all its runs, or one run.
    """
    is_ours = is_of_this_machine(place.path)
    for path in _unfinished(place):
        match = _BY_A_PROCESS.fullmatch(path.name)
        if match is not None:
            try:
                written_at = path.stat().st_mtime
                if _is_being_written(int(match[1]), written_at):
                    continue
                if is_ours or file_age_s(path) > _DAY_S:
                    path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue
            except OSError:
                return


def _is_being_written(pid: int, written_at: float) -> bool:
    """Whether the process of that id may still write a file.

    One that is dead and that its parent has not waited for writes nothing, and an id that is given
    anew belongs to a process younger than the file.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.create_time() <= written_at + _CLOCK_S
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _unfinished(place: SweepFolder | RunFolder) -> list[Path]:
    if isinstance(place, RunFolder):
        return _unfinished_in(place.path) + _unfinished_in(place.checkpoints)

    def of_run(run: RunFolder) -> list[Path]:
        return _unfinished(run) if CLAIMS.holder(run) is None else []

    found = read_each(of_run, place.run_folders(), place.path)
    return _unfinished_in(place.path) + list(chain.from_iterable(found))


def _unfinished_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.name.endswith(".tmp")]
    except OSError:
        return []
