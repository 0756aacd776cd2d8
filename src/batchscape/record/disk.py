"""What a disk has left, and what to say when it takes no more."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import psutil

from batchscape.errors import DiskError

__all__ = [
    "Reserve",
    "disk_error",
    "disk_trouble",
    "explained",
    "free_bytes",
    "is_of_this_machine",
    "make_room",
    "read_each",
    "size_text",
]

_CAUSES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG})
"""Errors that a write meets because of the disk, not because of what it was told."""
_PROBE_BYTES = 1 << 16
"""What a disk must still take for a run to begin: its JSON files and first rows."""
_LONGEST_CHAIN = 10
"""Exceptions that raised each other; a loop of them has no end."""
_READERS = 16
_Folder = TypeVar("_Folder")
_Read = TypeVar("_Read")
_RESERVE_BYTES = 1 << 18
_NO_DISK_HAS = 2**70
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


def size_text(size: float) -> str:
    """Write a number of bytes as a person reads it."""
    if size > _NO_DISK_HAS:
        return "more than any disk has"
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def disk_error(error: OSError, path: Path, needed: int | None = None) -> OSError:
    """Return what to raise for a write that failed.

    Parameters
    ----------
    error : OSError
    path : Path
        What was written to.
    needed : int, optional
        What the write needed, in bytes.

    Returns
    -------
    OSError
        A `DiskError` that names the disk, what is free and what was needed, where the disk is the
        cause; else the error itself.
    """
    if isinstance(error, DiskError) or error.errno not in _CAUSES:
        return error
    explained = DiskError(_explained(error, path, needed))
    explained.errno = error.errno
    return explained


def explained(error: Exception, path: Path) -> Exception:
    """Return a `DiskError` for an exception that a disk is behind; else the exception itself.

    Parameters
    ----------
    error : Exception
        What it was raised from counts as well: a library may wrap what a file raised.
    path : Path
        What was most likely written to, where the exception names no file.
    """
    found: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if isinstance(found, DiskError):
            return found
        if isinstance(found, OSError) and found.errno in _CAUSES:
            named = Path(found.filename) if isinstance(found.filename, str) else path
            return disk_error(found, named if named.is_absolute() else path)
        found = None if found is None else found.__cause__ or found.__context__
    return error


def _explained(error: OSError, path: Path, needed: int | None) -> str:
    if error.errno == errno.EROFS:
        return f"{path} is on a read-only disk and cannot be written"
    mount = _mount_of(path)
    if error.errno == errno.EIO:
        return f"the disk at {mount} failed to write {path} (input/output error); check the disk"
    about = "" if needed is None else f", needed about {size_text(needed)}"
    if error.errno == errno.EFBIG:
        return (
            f"{path} may not grow further{about}: a limit on the size of files (ulimit -f) is met"
        )
    if error.errno == errno.EDQUOT:
        return f"the disk quota at {mount} is used up{about} for {path}"
    try:
        free = size_text(free_bytes(path))
    except OSError:
        free = "nothing known to be"
    return f"no space left on {mount}: {free} free{about} for {path}"


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
        found = disk_error(error, folder, _PROBE_BYTES)
        return str(found) if isinstance(found, DiskError) else f"{folder} cannot be used: {error}"
    return None


class Reserve:
    """Space that a launcher keeps in its sweep folder, to write how runs ended on a full disk.

    Each has its own; that of one that was killed goes with its unfinished files.

    Parameters
    ----------
    folder : Path
        Of the sweep.
    """

    def __init__(self, folder: Path) -> None:
        self._path = _reserve(folder)

    def __enter__(self) -> Reserve:
        # A disk that has no room for it is found out by the first run.
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                # Written, not allocated: some file systems promise what they do not keep.
                os.write(descriptor, bytes(_RESERVE_BYTES))
            finally:
                os.close(descriptor)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def make_room(sweep_dir: Path) -> bool:
    """Give the reserve of this launcher back to a full disk; return whether there was one."""
    try:
        _reserve(sweep_dir).unlink()
    except OSError:
        return False
    return True


def _reserve(sweep_dir: Path) -> Path:
    return sweep_dir / f".reserve.{os.getpid()}.tmp"


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _mount_of(path: Path) -> Path:
    path = _existing(path).resolve()
    while not path.is_mount() and path != path.parent:
        path = path.parent
    return path
