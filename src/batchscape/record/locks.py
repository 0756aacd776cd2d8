"""Locks on files: held by open descriptors, and therefore released by any death of a process.

A lock (`flock`) belongs to an open file, not to a process: descriptors that other processes inherit
prolong it to their own end.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Lock", "exclusively", "has_no_locks", "is_held", "public_folder", "take", "take_public"]

_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})


def has_no_locks(error: OSError) -> bool:
    """Whether a lock failed as its file system has none: Lustre without `flock`, some of NFS."""
    return error.errno in _WITHOUT_LOCKS


@dataclass(frozen=True)
class Lock:
    """A lock that is held.

    Parameters
    ----------
    path : Path
    descriptor : int
        Open file that carries the lock; to be passed to processes that shall prolong it.
    """

    path: Path
    descriptor: int

    def release(self, *, remove: bool = False) -> None:
        """Give the lock up, also for processes that have inherited it.

        Parameters
        ----------
        remove : bool
            Whether to remove the file too: nobody will need this lock again.
        """
        # A folder that was moved has taken the file along: the one that is there now is another's.
        if remove and _is_at(self.path, self.descriptor):
            self.path.unlink(missing_ok=True)
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        os.close(self.descriptor)


def take(path: Path) -> Lock | None:
    """Take a lock, if nobody else holds it.

    Parameters
    ----------
    path : Path
        Made if it does not exist; its folder must.

    Returns
    -------
    Lock or None
        None while others hold it.

    Raises
    ------
    OSError
        If the file cannot be opened, or its file system has no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file that was opened may have been removed since.
            is_there = _is_at(path, descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        if is_there:
            return Lock(path, descriptor)
        os.close(descriptor)


def public_folder(name: str) -> Path:
    """Name a folder for the files of all users of this machine, in the temporary folder."""
    return Path(tempfile.gettempdir()) / name


def take_public(path: Path, kind: int = fcntl.LOCK_EX) -> Lock | None:
    """Take a lock on a file that launchers of all users share and nobody removes.

    Parameters
    ----------
    path : Path
        In a `public_folder`; made if it does not exist, with its folder.
    kind : int
        `fcntl.LOCK_EX`, or `fcntl.LOCK_SH` beside others.

    Returns
    -------
    Lock or None
        None while others hold it.

    Raises
    ------
    OSError
        If the file cannot be opened, or its file system has no locks.
    """
    descriptor = _open_public(path)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return Lock(path, descriptor)


def _open_public(path: Path) -> int:
    # Reading is enough to lock, and is all that other users may do with it. Links are not followed,
    # and a pipe must not block.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(FileNotFoundError):
        return os.open(path, flags)
    with suppress(FileExistsError):
        path.parent.mkdir()
        # As the folder above it: everybody may add files, nobody may remove another's.
        path.parent.chmod(0o1777)
    with suppress(FileExistsError):
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
        os.fchmod(descriptor, 0o644)
        return descriptor
    return os.open(path, flags)


def is_held(path: Path) -> bool:
    """Whether anybody holds a lock, shared or not.

    Nobody does where there is no such file, or its file system has no locks.
    """
    try:
        # Network file systems lock only what may be written to.
        mode = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
        descriptor = os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not has_no_locks(error)
    finally:
        os.close(descriptor)
    return False


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Hold a lock for a short time, waiting for others who do the same.

    Where the file system has no locks nobody waits.

    Parameters
    ----------
    path : Path
        Made if it does not exist, with its folder.

    Raises
    ------
    OSError
        If the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if not has_no_locks(error):
                raise
        yield
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
