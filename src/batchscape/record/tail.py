"""Following a file of JSON lines that another process appends to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from batchscape.errors import DamageError
from batchscape.record.files import parsed_row

__all__ = ["Tail"]


class Tail:
    """Reads the lines that were appended to a file since the last time.

    Parameters
    ----------
    path : Path
        Need not exist yet; may be replaced by another file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the new rows; all of them, if the file was replaced.

        Raises
        ------
        RecordError
            If a line is damaged; one without its end is left for the next time.
        """
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset = stat.st_ino, 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        try:
            return [parsed_row(line) for line in whole.split(b"\n")[:-1]]
        except ValueError as error:
            msg = f"{self._path} is damaged: {error}"
            raise DamageError(msg) from None
