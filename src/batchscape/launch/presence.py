"""Whether other launchers are at work on this machine: they would spoil each other's times.

Every launcher holds a lock on a file of its own, in one folder for all users. A lock ends with its
process, however that ends; files without one are left from launchers that were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path
from types import TracebackType

from batchscape.record.locks import public_folder

__all__ = ["Presence"]


class Presence:
    """Shows this launcher to others while it is entered, and finds them.

    One that only waits for devices hides: it takes nothing from the runs of others. Where the
    folder cannot be used, nobody is shown and nobody found.
    """

    def __init__(self) -> None:
        self._folder = public_folder("batchscape-launchers")
        self._own: Path | None = None
        self._descriptor = -1
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
        if self._own is None:
            with contextlib.suppress(OSError):
                self._announce()

    def hide(self) -> None:
        """Let others know that this launcher does nothing."""
        if self._own is not None:
            with contextlib.suppress(OSError):
                self._own.unlink()
            os.close(self._descriptor)
            self._own = None

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

    def _announce(self) -> None:
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir()
            # As the folder above it: everybody may add files, nobody may remove those of others.
            self._folder.chmod(0o1777)
        descriptor, hidden = tempfile.mkstemp(prefix=".", dir=self._folder)
        try:
            os.fchmod(descriptor, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Seen only with its lock: without one it would be taken for left over.
            own = Path(hidden).with_name(Path(hidden).name.removeprefix("."))
            Path(hidden).rename(own)
        except OSError:
            os.close(descriptor)
            Path(hidden).unlink(missing_ok=True)
            raise
        self._own, self._descriptor = own, descriptor

    def _look(self) -> bool:
        try:
            paths = [path for path in self._folder.iterdir() if not path.name.startswith(".")]
        except OSError:
            return False
        return any(_is_held(path) for path in paths if path != self._own)


def _is_held(path: Path) -> bool:
    """Whether a launcher lives that holds the file; one that nobody holds is removed."""
    try:
        # Whatever lies there: links are not followed, and a pipe must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
