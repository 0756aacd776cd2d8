"""Following a text that another process appends to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from batchscape.errors import RecordError

__all__ = ["Lines", "content_of"]


class Lines:
    """The whole lines of a file, each of them once.

    Parameters
    ----------
    path : Path
        Need not exist yet.
    begin : int
        Bytes at its begin that are not read.
    """

    def __init__(self, path: Path, begin: int = 0) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._offset = begin
        self.is_torn = False
        """Whether the last line that was returned had no end."""

    def read(self, *, final: bool = False) -> tuple[list[str], bool]:
        """Return the new lines, and whether they are those of another file than before.

        Parameters
        ----------
        final : bool
            The writer has ended: a last line without its end is returned as well.

        Raises
        ------
        RecordError
            If it is no file, or cannot be read.
        """
        try:
            _refuse_others(self.path)
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                identity = (found.st_dev, found.st_ino)
                anew = self._identity is not None and (
                    identity != self._identity or found.st_size < self._offset
                )
                if anew:
                    self._offset = 0
                self._identity = identity
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return [], False
        except OSError as error:
            msg = f"{self.path} cannot be read: {error.strerror}"
            raise RecordError(msg) from None
        whole = content if final else content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.is_torn = bool(whole) and not whole.endswith(b"\n")
        text = whole.decode(errors="replace").replace("\r", "\n")
        return [line for line in text.split("\n") if line], anew


def content_of(path: Path) -> bytes | None:
    """Return what a file holds; None: it is not there.

    Raises
    ------
    RecordError
        If it is no file, or cannot be read.
    """
    try:
        _refuse_others(path)
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}"
        raise RecordError(msg) from None


def _refuse_others(path: Path) -> None:
    """Refuse what is no file: to open a pipe waits for its other end, and a device may not end."""
    if not stat.S_ISREG(path.stat().st_mode):
        msg = (
            f"{path} is no regular file: metrics are read while the program writes them and once "
            "more at its end"
        )
        raise RecordError(msg)
