"""Nothing is written outside the sweep folder: not through links in it, nor by names in its files.

A folder that was copied or unpacked from somewhere may hold links that lead elsewhere. What it
holds is written to and removed, so a link that leaves the folder is refused before anything is.
The sweep folder itself may be a link: where it lies is its user's choice.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from batchscape.errors import LaunchError
from batchscape.record.folder import SweepFolder

__all__ = ["is_plain_name", "refuse_links"]

_OF_OTHERS = frozenset({"program"})
"""Folders of a run whose content programs write, which may link as they like."""
_NAME = re.compile(r"\w[\w.-]*")


def is_plain_name(name: object) -> bool:
    """Whether a text is the name of one file or folder: no separators, no `..`, no wildcards."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def refuse_links(sweep: SweepFolder, *, runs: bool = True) -> None:
    """Refuse a sweep folder in which something leads out of it, or is no file at all.

    Parameters
    ----------
    sweep : SweepFolder
        Need not exist.
    runs : bool
        Whether to look into the run folders too; else only at what stands beside them.

    Raises
    ------
    LaunchError
        If a link leads outside, or there is a pipe or a device, which would block who opens it.
    """
    root = Path(os.path.realpath(sweep.path))
    for entry in _entries(sweep, runs=runs):
        if entry.is_symlink():
            target = os.path.realpath(entry.path)
            if not Path(target).is_relative_to(root):
                msg = (
                    f"{entry.path} is a link to {target}, outside of the sweep folder, where "
                    "nothing is written. Remove the link, or put what it leads to in its place; "
                    "sweep_dir chooses another place for all of a sweep"
                )
                raise LaunchError(msg)
        elif not _is_ordinary(entry):
            msg = f"{entry.path} is neither a file nor a folder; remove it"
            raise LaunchError(msg)


def _entries(sweep: SweepFolder, *, runs: bool) -> Iterator[os.DirEntry[str]]:
    yield from _inside(sweep.path)
    if not runs:
        return
    for run in _inside(sweep.runs):
        yield run
        if run.is_dir():
            for entry in _inside(Path(run.path)):
                yield entry
                # Rows, checkpoints and the like; small folders, one level deep.
                if entry.is_dir() and entry.name not in _OF_OTHERS:
                    yield from _inside(Path(entry.path))


def _inside(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return


def _is_ordinary(entry: os.DirEntry[str]) -> bool:
    try:
        mode = entry.stat(follow_symlinks=False).st_mode
    except FileNotFoundError:
        return True  # gone since: a temporary file of a run beside us
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISSOCK(mode)
