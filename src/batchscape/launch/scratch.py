"""A folder for what the ranks of a launch share while they run: meeting points and heartbeats.

A launcher that is killed cannot remove its folder; the next launcher of the same user does. A lock
in each folder shows that it is in use.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchscape.record.locks import is_held, take

_PREFIX = "batchscape-scratch-"
_LOCK = "lock"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder among the temporary files of this machine, and remove it at the end.

    Yields
    ------
    Path
        Readable by this user alone.

    Raises
    ------
    OSError
        If the folder for temporary files cannot be used.
    """
    parent = Path(tempfile.gettempdir())
    _remove_leftovers(parent)
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    # It gets its name once it is locked: other launchers remove a folder without a lock.
    lock = take(hidden / _LOCK)
    folder = hidden.rename(parent / hidden.name.removeprefix("."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release()
        # What outlived a killed launcher for a while may have held its folder at the beginning.
        _remove_leftovers(parent)


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of launchers that are gone; those of other users cannot be removed."""
    with suppress(OSError):
        for leftover in parent.glob(f"{_PREFIX}*"):
            if not leftover.is_symlink() and not is_held(leftover / _LOCK):
                shutil.rmtree(leftover, ignore_errors=True)
