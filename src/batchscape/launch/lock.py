"""The lock of a sweep folder, which the launchers at work in it share: `status` asks for it.

Where the file system has no locks, a launcher is seen by the runs that it has.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from batchscape.errors import LaunchError
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import has_no_locks

__all__ = ["sweep_lock"]


@contextmanager
def sweep_lock(sweep: SweepFolder) -> Iterator[None]:
    """Show that a launcher is at work in a sweep, beside others if there are any.

    Raises
    ------
    LaunchError
        If the folder cannot be written to.
    """
    try:
        sweep.path.mkdir(parents=True, exist_ok=True)
        file = sweep.lock.open("a+b")
    except OSError as error:
        msg = f"{sweep.path} cannot be used ({error}); give a sweep_dir that can be written to"
        raise LaunchError(msg) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
        except OSError as error:
            if not has_no_locks(error):
                msg = f"{sweep.lock} cannot be locked: {error}"
                raise LaunchError(msg) from None
        try:
            yield
        finally:
            # Not only closed: a process may have inherited it.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
