"""Whether a sweep can be written to its folder, found out before anything is launched."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from batchscape.errors import LaunchError
from batchscape.record.containment import refuse_links
from batchscape.record.disk import disk_trouble
from batchscape.record.folder import SweepFolder

__all__ = ["check_usable"]

_LONGEST_FILE = ".environment.json.4194304.tmp"
"""Longest name that is written into a run folder: a file under its temporary name."""


def check_usable(sweep: SweepFolder, run_ids: Iterable[str] = ()) -> None:
    """Make the folder of a sweep if it is not there, and write to it for a trial.

    Parameters
    ----------
    sweep : SweepFolder
    run_ids : iterable of str
        Runs that the folder shall hold.

    Raises
    ------
    LaunchError
        If it is a file or below one, may not be written to, is on a disk that is full or read-only,
        or has a name that is too long, itself or with its runs; or if something in it leads out
        of it.
    """
    path = sweep.path.absolute()
    _check_names(path, run_ids)
    refuse_links(sweep)
    for place in (*reversed(path.parents), path):
        if place.exists() and not place.is_dir():
            raise _refusal(path, f"{place} is a file, not a folder")
        if place.is_symlink() and not place.exists():
            raise _refusal(path, f"{place} is a link to {place.readlink()}, which does not exist")
    try:
        sweep.runs.mkdir(parents=True, exist_ok=True)
    except PermissionError:
        place = next(place for place in (sweep.runs, *sweep.runs.parents) if place.exists())
        raise _refusal(path, f"no permission to write in {place}") from None
    except OSError as error:
        raise _refusal(path, disk_trouble(_standing(path)) or str(error)) from None
    for folder in (path, sweep.runs):
        if not os.access(folder, os.W_OK | os.X_OK) and not _is_read_only(folder):
            raise _refusal(path, f"no permission to write in {folder}")
    trouble = disk_trouble(path)
    if trouble is not None:
        raise _refusal(path, trouble)


def _refusal(path: Path, why: str) -> LaunchError:
    return LaunchError(f"{path} cannot be used: {why}; give a sweep_dir that can be written to")


def _check_names(path: Path, run_ids: Iterable[str]) -> None:
    standing = _standing(path)
    longest_name = os.pathconf(standing, "PC_NAME_MAX")
    longest_path = os.pathconf(standing, "PC_PATH_MAX")
    for name in (*path.parts, *run_ids):
        if (size := len(os.fsencode(name))) > longest_name:
            why = (
                f"the name {name[:40]}... has {size} bytes, and at most {longest_name} are possible"
            )
            raise _refusal(path, why)
    deepest = max((len(os.fsencode(name)) for name in run_ids), default=0)
    size = len(os.fsencode(path)) + len("/runs/") + deepest + len("/") + len(_LONGEST_FILE)
    if size >= longest_path:
        why = f"paths of its runs have {size} bytes, and fewer than {longest_path} are possible"
        raise _refusal(path, why)


def _standing(path: Path) -> Path:
    """Return the nearest folder above a path that exists; names may be too long to ask for."""
    for place in (path, *path.parents):
        try:
            if place.is_dir():
                return place
        except OSError:
            continue
    return Path("/")


def _is_read_only(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
