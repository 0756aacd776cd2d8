"""Whether other launchers are at work on this machine: they would spoil each other's times.

Every launcher holds a lock on a file of its own, in one folder for all users. A lock ends with its
process, however that ends; files without one are left from launchers that were killed.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from batchscape.record.locks import BESIDE, Lock, public_folder, take

__all__ = ["Presence"]


class Presence:
    """Shows this launcher to others while it is entered, and finds them.

    One that only waits for devices hides: it takes nothing from the runs of others. Where the
    folder cannot be used, nobody is shown and nobody found.
    """

    def __init__(self) -> None:
        self._folder = public_folder("batchscape-launchers")
        self._lock: Lock | None = None
        self._looked_at = float("-inf")
        self._found = False

    def __enter__(self) -> Presence:
        self.show()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hide()

    def show(self) -> None:
        """Let others know that this launcher is at work, if they do not."""
        with suppress(OSError):
            # Whoever looks holds a file for an instant: then it is another one.
            while self._lock is None:
                self._lock = take(self._folder / uuid4().hex, is_public=True)

    def hide(self) -> None:
        """Let others know that this launcher does nothing."""
        if self._lock is not None:
            with suppress(OSError):
                self._lock.release(remove=True)
            self._lock = None

    def others(self, max_age_s: float = 0.0) -> bool:
        """Return whether another launcher is at work.

        Parameters
        ----------
        max_age_s : float
            How old the answer may be, in seconds.
        """
        now = time.monotonic()
        if now - self._looked_at >= max_age_s:
            self._looked_at, self._found = now, self._look()
        return self._found

    def _look(self) -> bool:
        own = None if self._lock is None else self._lock.path
        try:
            return any(_is_held(path) for path in list(self._folder.iterdir()) if path != own)
        except OSError:
            return False


def _is_held(path: Path) -> bool:
    """Whether a launcher lives that holds the file; one that nobody holds is removed."""
    with suppress(OSError):
        lock = take(path, BESIDE, is_public=True)
        if lock is None:
            return True
        lock.release(remove=True)
    return False
