"""Free space of a disk, and errors of a disk that cannot be written to."""

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


_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG})
"""Errors of a write that are the disk's, and not the arguments'."""
_MACHINE_ERRNOS = _DISK_ERRNOS | {errno.ESTALE, errno.ENFILE, errno.EMFILE, errno.EAGAIN}
"""Errors of the system that its disks and limits cause, and not the settings of a run."""
_PROBE_BYTES = 1 << 16
"""Space that a run needs to begin: its JSON files and first rows."""
_LONGEST_CHAIN = 10
"""Longest chain of exceptions that is followed; a loop of them has no end."""
_READERS = 16
_Folder = TypeVar("_Folder")
_Read = TypeVar("_Read")
_LOCAL_FILE_SYSTEMS = {
    *("apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs"),
    *("jfs", "nilfs2", "overlay", "ramfs", "tmpfs", "xfs", "zfs"),
}
"""File systems that one machine has for itself."""


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds a path, for an unprivileged user.

    Parameters
    ----------
    path : Path
        Need not exist; then the nearest existing folder above it counts.
    """
    path = path.absolute()
    disk = os.statvfs(next(folder for folder in (path, *path.parents) if folder.exists()))
    return disk.f_bavail * disk.f_frsize


@functools.cache
def is_of_this_machine(folder: Path) -> bool:
    """Return whether a folder is on a file system that this machine has for itself."""
    folder = folder.resolve()
    # Of several disks mounted at one place the last one is visible.
    mounts = {Path(disk.mountpoint): disk.fstype for disk in psutil.disk_partitions(all=True)}
    visible_mounts = (mounts[path] for path in (folder, *folder.parents) if path in mounts)
    return next(visible_mounts, None) in _LOCAL_FILE_SYSTEMS


def read_each(
    read: Callable[[_Folder], _Read], folders: Sequence[_Folder], parent: Path
) -> list[_Read]:
    """Read each of many folders; return the results in their order.

    On a network file system reading is mostly waiting, and many folders are read at once; on a
    local one threads would only slow each other down.

    Parameters
    ----------
    read : callable
    folders : sequence
    parent : Path
        Folder that holds them.
    """
    if is_of_this_machine(parent):
        return list(map(read, folders))
    with ThreadPoolExecutor(_READERS) as readers:
        return list(readers.map(read, folders))


def disk_error(error: OSError, path: Path) -> OSError:
    """Return the error to raise for a write that failed.

    Parameters
    ----------
    error : OSError
    path : Path
        The file of the write.

    Returns
    -------
    OSError
        A `DiskError` with the free space, where the disk is the cause; else the error itself.
    """
    number = error.errno
    if isinstance(error, DiskError) or number not in _DISK_ERRNOS:
        return error
    try:
        free = size_text(free_bytes(path))
    except OSError:
        free = "nothing known to be"
    new_error = DiskError(f"{path} cannot be written: {os.strerror(number)}, {free} free there")
    new_error.errno = number
    return new_error


def as_disk_error(error: Exception, path: Path) -> Exception:
    """Return a `DiskError` for an exception that a disk caused; else the exception itself.

    Parameters
    ----------
    error : Exception
        Its causes count as well: a library may wrap the error of a file.
    path : Path
        Most likely path of the write, where the exception names no file.
    """
    for cause in causes_of(error, hidden=True):
        if isinstance(cause, DiskError):
            return cause
        if isinstance(cause, OSError) and cause.errno in _DISK_ERRNOS:
            file = Path(cause.filename) if isinstance(cause.filename, str) else path
            return disk_error(cause, file if file.is_absolute() else path)
    return error


def causes_of(error: BaseException, *, hidden: bool = False) -> Iterator[BaseException]:
    """Yield an exception and its chain of causes and contexts.

    Parameters
    ----------
    error : BaseException
    hidden : bool
        Whether to include contexts that `from None` hides.
    """
    cause: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if cause is None:
            return
        yield cause
        is_hidden = cause.__suppress_context__ and not hidden
        cause = cause.__cause__ or (None if is_hidden else cause.__context__)


def is_fault_of_the_machine(error: BaseException) -> bool:
    """Return whether the machine caused an exception: a full or failing disk, or a network."""
    is_of_system = isinstance(error, OSError) and error.errno in _MACHINE_ERRNOS
    return is_of_system or isinstance(error, ConnectionError)


def disk_trouble(folder: Path) -> str | None:
    """Say why the disk of a folder takes no more; None where it has space for a run to begin.

    This writes a file, as the free space says nothing of quotas, limits and disks that fail.

    Parameters
    ----------
    folder : Path
        Exists, unless the disk is in trouble.
    """
    path = folder / f".probe.{os.getpid()}.tmp"
    try:
        try:
            with path.open("wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return str(disk_error(error, folder))
    return None


def check_usable(sweep: SweepFolder) -> None:
    """Make the folder of a sweep if it does not exist, and test that it can be written to.

    Raises
    ------
    LaunchError
        If it cannot be written to, with the error of the system.
    """
    path = sweep.path.absolute()
    try:
        sweep.runs.mkdir(parents=True, exist_ok=True)
        trouble = disk_trouble(path) or disk_trouble(sweep.runs)
    except OSError as error:
        trouble = str(disk_error(error, path))
    if trouble is not None:
        raise LaunchError(
            f"{path} cannot be used: {trouble}; give a sweep_dir that can be written to"
        )
