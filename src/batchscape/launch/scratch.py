"""A folder for what ranks share while they run, which does not outlive its launcher for long.

A launcher that is killed cannot remove its folder; the next one of the same user does. A lock
inside tells which folders are in use.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchscape.record.locks import is_held, take

__all__ = ["scratch_folder"]

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
    _remove_left(parent)
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    # Seen by others only with its lock: without one it would be taken for left over.
    lock = take(hidden / _LOCK)
    folder = hidden.rename(parent / hidden.name.removeprefix("."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release()


def _remove_left(parent: Path) -> None:
    """Remove the folders of launchers that are gone; those of other users are not ours to touch."""
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{_PREFIX}*"):
            if not folder.is_symlink() and not is_held(folder / _LOCK):
                shutil.rmtree(folder, ignore_errors=True)
