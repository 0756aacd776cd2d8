"""Locks on files. Open descriptors hold them, so that the death of a process releases them.

A lock (`flock`) belongs to an open file, not to a process: it lasts until the last process ends
that has inherited the descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from batchscape.errors import LaunchError
from batchscape.record.folder import SweepFolder

EXCLUSIVE_NOWAIT = fcntl.LOCK_EX | fcntl.LOCK_NB
"""Exclusive, without waiting."""
SHARED_NOWAIT = fcntl.LOCK_SH | fcntl.LOCK_NB
"""Shared, without waiting."""
_NO_LOCK_ERRNOS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
"""Errors of file systems without locks: Lustre without `flock`, some of NFS."""


@dataclass(frozen=True)
class Lock:
    """A lock that is held.

    Parameters
    ----------
    path : Path
    descriptor : int
        Open file that carries the lock; processes that inherit it prolong the lock.
    keeps_out : bool
        Whether the lock excludes others; False where the file system has no locks.
    """

    path: Path
    descriptor: int
    keeps_out: bool = True

    def release(self, *, remove: bool = False) -> None:
        """Release the lock, also for processes that have inherited it.

        Parameters
        ----------
        remove : bool
            Whether to remove the file as well, as the lock is not needed again.
        """
        try:
            # Where the folder was moved, the file that is there now belongs to another.
            if remove and _is_at(self.path, self.descriptor):
                self.path.unlink(missing_ok=True)
        finally:
            with suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)


def take(
    path: Path, kind: int = EXCLUSIVE_NOWAIT, *, is_public: bool = False, is_needed: bool = True
) -> Lock | None:
    """Take a lock, if no other process holds it.

    Parameters
    ----------
    path : Path
        Made if it does not exist; its folder must, unless it is a `public_folder`.
    kind : int
        `EXCLUSIVE_NOWAIT` or `SHARED_NOWAIT`; `fcntl.LOCK_EX` and `fcntl.LOCK_SH` wait for others.
    is_public : bool
        Whether processes of all users take it.
    is_needed : bool
        Whether a file system without locks is an error; else the lock excludes nobody.

    Returns
    -------
    Lock or None
        None while others hold it.

    Raises
    ------
    OSError
        If the file cannot be opened or locked.
    """
    while True:
        descriptor = (
            _open_public(path) if is_public else os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        )
        try:
            fcntl.flock(descriptor, kind)
            # The file that was opened may have been removed since.
            if _is_at(path, descriptor):
                return Lock(path, descriptor)
        except BaseException as error:
            if not is_needed and getattr(error, "errno", None) in _NO_LOCK_ERRNOS:
                return Lock(path, descriptor, keeps_out=False)
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        os.close(descriptor)


def public_folder(name: str) -> Path:
    """Return a folder for files of all users of this machine, in the temporary folder."""
    return Path(tempfile.gettempdir()) / name


def _open_public(path: Path) -> int:
    with suppress(FileNotFoundError):
        return _open(path)
    with suppress(FileExistsError):
        path.parent.mkdir()
        # Like the temporary folder: all users may add files, and remove only their own.
        path.parent.chmod(0o1777)
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.fchmod(descriptor, 0o644)
        return descriptor
    return _open(path)


def _open(path: Path) -> int:
    """Open a file; links are not followed, and a pipe does not block."""
    # Network file systems lock only files that may be written; elsewhere reading is enough, which
    # is all that other users may do.
    mode = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
    return os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK)


def is_held(path: Path) -> bool:
    """Whether a process holds a lock; False without a file, or on a file system without locks."""
    try:
        descriptor = _open(path)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, EXCLUSIVE_NOWAIT)
    except OSError as error:
        return error.errno not in _NO_LOCK_ERRNOS
    finally:
        os.close(descriptor)
    return False


@contextmanager
def hold(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock, waiting for others that hold it; without waiting where there are no locks.

    Parameters
    ----------
    path : Path
        Made if it does not exist, with its folder.
    kind : int
        `fcntl.LOCK_EX`, or `fcntl.LOCK_SH` beside others.

    Raises
    ------
    OSError
        If the file cannot be opened or locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = take(path, kind, is_needed=False)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


@contextmanager
def sweep_lock(sweep: SweepFolder) -> Iterator[None]:
    """Show that a launcher is at work in a sweep, beside others if there are any.

    `status` reads it; where the file system has no locks, `status` infers it from the runs.

    Raises
    ------
    LaunchError
        If the folder cannot be written to.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(hold(sweep.lock, fcntl.LOCK_SH))
        except OSError as error:
            raise LaunchError(
                f"{sweep.path} cannot be used ({error}); give a sweep_dir that can be written to"
            ) from None
        yield


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
