"""One launcher a sweep folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from batchscape.errors import LaunchError
from batchscape.record.folder import SweepFolder

__all__ = ["sweep_lock"]

_PATIENCE_S = 1.0
"""How long to try: who asks whether a sweep is locked holds the lock for a moment."""


@contextmanager
def sweep_lock(sweep: SweepFolder) -> Iterator[int]:
    """Hold the lock of a sweep.

    Yields
    ------
    int
        File descriptor that carries the lock. Processes that inherit it prolong the lock to their
        own end, so that a new launcher never meets the ranks of one that was killed.

    Raises
    ------
    LaunchError
        If another launcher holds it, or the folder cannot be written to, or has no locks.
    """
    path = sweep.path / ".lock"
    try:
        sweep.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        msg = f"{sweep.path} cannot be used ({error}); give a sweep_dir that can be written to"
        raise LaunchError(msg) from None
    try:
        try:
            _lock(descriptor)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace") or "unknown"
            msg = (
                f"another launcher (process {holder}) is at work in {sweep.path}; "
                f"wait for its end, stop it, or give another sweep_dir"
            )
            raise LaunchError(msg) from None
        except OSError as error:
            msg = f"{path} cannot be locked ({error}); put sweep_dir on a file system with locks"
            raise LaunchError(msg) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PATIENCE_S / 20)
        else:
            return
