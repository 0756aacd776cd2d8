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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from batchscape.errors import LaunchError
from batchscape.record.folder import SweepFolder

AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB
"""For one alone, and only if nobody else has it now."""
BESIDE = fcntl.LOCK_SH | fcntl.LOCK_NB
"""Beside others who have it so, and only if nobody has it alone."""
_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
"""What a lock fails with where its file system has none: Lustre without `flock`, some of NFS."""


@dataclass(frozen=True)
class Lock:
    """A lock that is held.

    Parameters
    ----------
    path : Path
    descriptor : int
        Open file that carries the lock; to be passed to processes that shall prolong it.
    keeps_out : bool
        Whether others are kept out; not where the file system has no locks.
    """

    path: Path
    descriptor: int
    keeps_out: bool = True

    def release(self, *, remove: bool = False) -> None:
        """Give the lock up, also for processes that have inherited it.

        Parameters
        ----------
        remove : bool
            Whether to remove the file too: nobody will need this lock again.
        """
        try:
            # A folder that was moved has taken the file along: the one there now is another's.
            if remove and _is_at(self.path, self.descriptor):
                self.path.unlink(missing_ok=True)
        finally:
            with suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)


def take(
    path: Path, kind: int = AT_ONCE, *, is_public: bool = False, is_needed: bool = True
) -> Lock | None:
    """Take a lock, if nobody else holds it.

    Parameters
    ----------
    path : Path
        Made if it does not exist; its folder must, unless it is a `public_folder`.
    kind : int
        `AT_ONCE` or `BESIDE`; `fcntl.LOCK_EX` and `fcntl.LOCK_SH` wait for others.
    is_public : bool
        Whether processes of all users take it.
    is_needed : bool
        Whether a file system that has no locks is an error; else the lock keeps nobody out.

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
            if not is_needed and getattr(error, "errno", None) in _WITHOUT_LOCKS:
                return Lock(path, descriptor, keeps_out=False)
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        os.close(descriptor)


def public_folder(name: str) -> Path:
    """Name a folder for the files of all users of this machine, in the temporary folder."""
    return Path(tempfile.gettempdir()) / name


def _open_public(path: Path) -> int:
    with suppress(FileNotFoundError):
        return _open(path)
    with suppress(FileExistsError):
        path.parent.mkdir()
        # As the folder above it: everybody may add files, nobody may remove another's.
        path.parent.chmod(0o1777)
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.fchmod(descriptor, 0o644)
        return descriptor
    return _open(path)


def _open(path: Path) -> int:
    """Open whatever is there: links are not followed, and a pipe must not block."""
    # Network file systems lock only what may be written to; else reading is enough to lock, and is
    # all that other users may do.
    mode = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
    return os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK)


def is_held(path: Path) -> bool:
    """Whether anybody holds a lock, shared or not.

    Nobody does where there is no such file, or its file system has no locks.
    """
    try:
        descriptor = _open(path)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, AT_ONCE)
    except OSError as error:
        return error.errno not in _WITHOUT_LOCKS
    finally:
        os.close(descriptor)
    return False


@contextmanager
def hold(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock for a time, waiting for others who do the same.

    Where the file system has no locks nobody waits.

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

    `status` asks for it; where the file system has no locks, a launcher is seen by its runs.

    Raises
    ------
    LaunchError
        If the folder cannot be written to.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(hold(sweep.lock, fcntl.LOCK_SH))
        except OSError as error:
            msg = f"{sweep.path} cannot be used ({error}); give a sweep_dir that can be written to"
            raise LaunchError(msg) from None
        yield


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
