"""What a disk has left, and what to say when it takes no more."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from batchscape.errors import DiskError, LaunchError
from batchscape.text import size_text

if TYPE_CHECKING:
    from batchscape.record.folder import SweepFolder


_CAUSES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG})
"""Errors that a write meets because of the disk, not because of what it was told."""
_PROBE_BYTES = 1 << 16
"""What a disk must still take for a run to begin: its JSON files and first rows."""
_LONGEST_CHAIN = 10
"""Exceptions that raised each other; a loop of them has no end."""
_READERS = 16
_Folder = TypeVar("_Folder")
_Read = TypeVar("_Read")
_LOCAL = frozenset({"apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs"}) | {
    *("nilfs2", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
}
"""File systems that one machine has for itself."""


def free_bytes(path: Path) -> int:
    """Return what an unprivileged user may still write to the disk that holds a path, in bytes.

    Parameters
    ----------
    path : Path
        Need not exist: the folder above it counts that does.
    """
    found = os.statvfs(_existing(path))
    return found.f_bavail * found.f_frsize


@functools.cache
def is_of_this_machine(folder: Path) -> bool:
    """Return whether a folder is on a file system that this machine has for itself."""
    place = folder.resolve()
    # Of several at one place the last one is seen.
    mounts = {Path(disk.mountpoint): disk.fstype for disk in psutil.disk_partitions(all=True)}
    return next((mounts[at] in _LOCAL for at in (place, *place.parents) if at in mounts), False)


def read_each(
    read: Callable[[_Folder], _Read], folders: Sequence[_Folder], at: Path
) -> list[_Read]:
    """Return what is read of each of many folders, in their order.

    Where the file system is not this machine's own, reading is waiting for answers, and many are
    read at once; else threads would only take each other's time.

    Parameters
    ----------
    read : callable
    folders : sequence
    at : Path
        Where they are.
    """
    if is_of_this_machine(at):
        return list(map(read, folders))
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(read, folders))


def disk_error(error: OSError, path: Path) -> OSError:
    """Return what to raise for a write that failed.

    Parameters
    ----------
    error : OSError
    path : Path
        What was written to.

    Returns
    -------
    OSError
        A `DiskError` that says what is free, where the disk is the cause; else the error itself.
    """
    number = error.errno
    if isinstance(error, DiskError) or number is None or number not in _CAUSES:
        return error
    try:
        free = size_text(free_bytes(path))
    except OSError:
        free = "nothing known to be"
    of_disk = DiskError(f"{path} cannot be written: {os.strerror(number)}, {free} free there")
    of_disk.errno = number
    return of_disk


def explained(error: Exception, path: Path) -> Exception:
    """Return a `DiskError` for an exception that a disk is behind; else the exception itself.

    Parameters
    ----------
    error : Exception
        What it was raised from counts as well: a library may wrap what a file raised.
    path : Path
        What was most likely written to, where the exception names no file.
    """
    for cause in causes_of(error, hidden=True):
        if isinstance(cause, DiskError):
            return cause
        if isinstance(cause, OSError) and cause.errno in _CAUSES:
            named = Path(cause.filename) if isinstance(cause.filename, str) else path
            return disk_error(cause, named if named.is_absolute() else path)
    return error


def causes_of(error: BaseException, *, hidden: bool = False) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from, or while they were handled.

    Parameters
    ----------
    error : BaseException
    hidden : bool
        Whether those count that `from None` hides.
    """
    found: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if found is None:
            return
        yield found
        is_hidden = found.__suppress_context__ and not hidden
        found = found.__cause__ or (None if is_hidden else found.__context__)


def disk_trouble(folder: Path) -> str | None:
    """Say why the disk of a folder takes no more; None where it takes enough for a run to begin.

    It is asked by writing: what is free says nothing of quotas, limits and disks that fail.

    Parameters
    ----------
    folder : Path
        Exists, unless the disk is in trouble.
    """
    path = folder / f".probe.{os.getpid()}.tmp"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            left = _PROBE_BYTES
            while left:
                left -= os.write(descriptor, bytes(left))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)
    except OSError as error:
        return str(disk_error(error, folder))
    return None


def check_usable(sweep: SweepFolder) -> None:
    """Make the folder of a sweep if it is not there, and write to it for a trial.

    Raises
    ------
    LaunchError
        If it cannot be written to, with the reason of the system.
    """
    path = sweep.path.absolute()
    try:
        sweep.runs.mkdir(parents=True, exist_ok=True)
        trouble = disk_trouble(path) or disk_trouble(sweep.runs)
    except OSError as error:
        trouble = str(disk_error(error, path))
    if trouble is not None:
        msg = f"{path} cannot be used: {trouble}; give a sweep_dir that can be written to"
        raise LaunchError(msg)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
