"""The locks of a sweep: launchers share the folder, and each run has one launcher at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchscape.errors import LaunchError
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.locks import Lock, take

__all__ = ["run_lock", "sweep_lock"]

_PATIENCE_S = 1.0
"""How long to try: who asks whether a sweep is locked holds the lock for a moment."""


@contextmanager
def sweep_lock(sweep: SweepFolder) -> Iterator[None]:
    """Show that a launcher is at work in a sweep, beside others if there are any.

    Raises
    ------
    LaunchError
        If the folder cannot be written to, or has no locks.
    """
    try:
        sweep.path.mkdir(parents=True, exist_ok=True)
        # Opened here for a message of its own: what fails below is the lock, not the folder.
        sweep.lock.open("ab").close()
    except OSError as error:
        msg = f"{sweep.path} cannot be used ({error}); give a sweep_dir that can be written to"
        raise LaunchError(msg) from None
    lock = _taken(sweep.lock, shared=True, patience_s=_PATIENCE_S)
    if lock is None:
        msg = f"{sweep.lock} is held by a program that is no launcher; end it, or wait for its end"
        raise LaunchError(msg)
    try:
        yield
    finally:
        lock.release()


def run_lock(folder: RunFolder) -> Lock | None:
    """Take the lock of a run, for the time from its start to its end.

    Its ranks are to inherit it: a launcher that is killed releases nothing that they still use.

    Returns
    -------
    Lock or None
        None while another launcher holds it, or ranks that it left behind.

    Raises
    ------
    LaunchError
        If the file system has no locks.
    OSError
        If the folder cannot be written to.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    lock = _taken(folder.lock)
    if lock is not None:
        with suppress(OSError):  # for messages only; a full disk takes nothing from the lock
            lock.sign()
    return lock


def _taken(path: Path, *, shared: bool = False, patience_s: float = 0.0) -> Lock | None:
    try:
        return take(path, shared=shared, patience_s=patience_s)
    except OSError as error:
        msg = f"{path} cannot be locked ({error}); put sweep_dir on a file system with locks"
        raise LaunchError(msg) from None
