"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from batchscape.errors import RecordError

__all__ = [
    "JsonLines",
    "keep_json_lines",
    "read_json",
    "read_json_lines",
    "sha256_of",
    "write_atomically",
    "write_json",
]


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, flush it to the disk, and move it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object atomically. NaN and infinities are refused, JSON has none."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomically(path, text.encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    RecordError
        If the file is missing or is not one whole JSON object.
    """
    try:
        # Tens of thousands of small files are read at once: a buffer for each takes time.
        with path.open("rb", buffering=0) as file:
            content = json.loads(file.read())
    except FileNotFoundError:
        msg = f"{path} is missing"
        raise RecordError(msg) from None
    except ValueError as error:
        msg = f"{path} is damaged: {error}"
        raise RecordError(msg) from None
    if not isinstance(content, dict):
        msg = f"{path} is damaged: a JSON object is expected, found {type(content).__name__}"
        raise RecordError(msg)
    return content


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class JsonLines:
    """Appends rows to a file, one JSON object a line, each batch in a single write.

    A crash can tear the last line only; `read_json_lines` drops it. Numbers that JSON cannot
    carry are written as Python's `NaN` and `Infinity`, which `read_json_lines` understands.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows; they are in the file (though not yet on the disk) on return."""
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
        remaining = memoryview(text.encode())
        while remaining:
            written = os.write(self._descriptor, remaining)
            remaining = remaining[written:]

    def flush(self) -> None:
        """Wait until every row is on the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Flush to the disk and close."""
        self.flush()
        os.close(self._descriptor)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines; a missing file has none, a torn last line is dropped.

    Raises
    ------
    RecordError
        If any line but a torn last one is damaged.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                msg = f"{path} is damaged in line {number}: {error}"
                raise RecordError(msg) from None
            yield row


def keep_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file of JSON lines without the rows that `keep` refuses."""
    rows = [row for row in read_json_lines(path) if keep(row)]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _cut_torn_line(path: Path) -> None:
    """Remove a last line without its newline, so that the next row starts on a line of its own."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        write_atomically(path, content[: content.rfind(b"\n") + 1])
