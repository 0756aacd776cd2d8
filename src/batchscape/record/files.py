"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from batchscape.errors import DamageError, RecordError
from batchscape.outgoing import redact_json
from batchscape.record.disk import disk_error
from batchscape.record.folder import FORMAT_VERSION


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
            If a line is damaged; an unfinished line is read the next time.
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
        lines = content[: content.rfind(b"\n") + 1]
        self._offset += len(lines)
        return [_parse(line, self._path) for line in lines.split(b"\n")[:-1]]


_TAIL_BYTES = 1 << 14
"""Bytes that are read of the end of a table for its last row, which takes less than a tenth."""


_NO_LINK_ERRNOS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
"""Errors of a file system without hard links."""


def write_atomically(path: Path, content: bytes, *, replaces: bool = True) -> None:
    """Write `content` beside `path`, flush it to the disk, and move it into place.

    Raises
    ------
    FileExistsError
        If it exists and `replaces` is false: of several writers one succeeds.
    DiskError
        If the disk takes no more; the earlier content is kept.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            temporary.replace(path)
        else:
            link_or_copy(temporary, path)
            temporary.unlink()
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(error, path) from error
        raise


def link_or_copy(source: Path, path: Path) -> None:
    """Link a file to a free name; of several callers one succeeds.

    Where there are no hard links, it is copied, and the copy may be seen before it is complete.

    Raises
    ------
    FileExistsError
        If the name is taken.
    """
    try:
        path.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_LINK_ERRNOS:
            raise
        with path.open("xb") as file:
            try:
                file.write(source.read_bytes())
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                path.unlink()
                raise


def write_json(path: Path, content: Mapping[str, Any], *, replaces: bool = True) -> None:
    """Write a JSON object, atomically. NaN and infinities are refused.

    Raises
    ------
    FileExistsError
        If it exists and `replaces` is false.
    DiskError
        If the disk takes no more.
    """
    # Settings with secrets were refused before; the message of a library may still quote one.
    text = json.dumps(redact_json(content), indent=2, allow_nan=False)
    write_atomically(path, f"{text}\n".encode(), replaces=replaces)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    DamageError
        If the file is missing, or is not one complete JSON object.
    RecordError
        If it cannot be read.
    """
    try:
        # Tens of thousands of small files are read at once: a buffer for each takes time.
        with path.open("rb", buffering=0) as file:
            content = file.read()
    except FileNotFoundError:
        raise DamageError(f"{path} is missing") from None
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    return _parse(content, path)


def read_json_if_there(path: Path) -> dict[str, Any]:
    """Read a JSON object as `read_json` does; an empty one where there is no file."""
    return read_json(path) if path.exists() else {}


def read_record(path: Path) -> dict[str, Any]:
    """Read a JSON object of this format version, and return it without the version.

    Raises
    ------
    RecordError
        If the file is missing, damaged, or of another format version.
    """
    content = read_json(path)
    version = content.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise RecordError(
            f"{path} has format version {version}; this batchscape reads version {FORMAT_VERSION}. "
            "Use the batchscape that wrote it, or another sweep_dir"
        )
    return content


def read_sealed(path: Path, seal_entry: Mapping[str, Any]) -> bytes:
    """Read a sealed file, and check its hash.

    Parameters
    ----------
    path : Path
    seal_entry : mapping
        Its entry in `RunStatus.seal`.

    Raises
    ------
    DamageError
        If it is missing or differs.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != seal_entry["sha256"]:
        raise DamageError(f"{path} is missing or differs from what was sealed")
    return content


def _parse(text: bytes, path: Path, place: str = "") -> dict[str, Any]:
    """Parse one complete JSON object of a file, or say where the file is damaged."""
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"a JSON object is expected, found {type(content).__name__}")
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} is damaged{place}: {error}") from None
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
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A torn last line is removed, so that the next row starts on a line of its own.
            content = path.read_bytes() if path.exists() else b""
            if content and not content.endswith(b"\n"):
                write_atomically(path, content[: content.rfind(b"\n") + 1])
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise disk_error(error, path) from error

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows; they are in the file (though not yet on the disk) on return.

        Raises
        ------
        DiskError
            If the disk takes no more; the earlier rows are complete.
        """
        text = json_lines(rows)
        written = 0
        try:
            while written < len(text):
                written += os.write(self._descriptor, memoryview(text)[written:])
        except OSError as error:
            if written:
                # Rows of another rank may follow, once there is space again.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise disk_error(error, self._path) from error

    def flush(self) -> None:
        """Wait until every row is on the disk."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise disk_error(error, self._path) from error

    def close(self) -> None:
        """Flush to the disk and close."""
        try:
            self.flush()
        finally:
            os.close(self._descriptor)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines; a missing file has none, a torn last line is dropped.

    Raises
    ------
    DamageError
        If any line but a torn last one is damaged.
    RecordError
        If the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                yield _parse(line, path, f" in line {number}")
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None


def last_row(path: Path, tail_bytes: int = _TAIL_BYTES) -> dict[str, Any]:
    """Return the last complete row of a file of JSON lines; only the end of the file is read.

    Parameters
    ----------
    path : Path
    tail_bytes : int
        Bytes to read; a longer row is not found.

    Returns
    -------
    dict
        Empty where there is no complete row, or no file.

    Raises
    ------
    DamageError
        If the last complete line is damaged.
    """
    # The text after the last newline is empty or torn; the first line may be cut.
    end = end_of(path, tail_bytes)
    lines = end.split(b"\n")[1 if len(end) == tail_bytes else 0 : -1]
    return _parse(lines[-1], path, " in its last line") if lines else {}


def end_of(path: Path, max_bytes: int, since: int = 0) -> bytes:
    """Return the last bytes of a file; none where there is no file.

    Parameters
    ----------
    path : Path
    max_bytes : int
    since : int
        Bytes before this offset do not count.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since, size - max_bytes))
            return file.read(max_bytes)
    except FileNotFoundError:
        return b""


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return rows as lines; NaN and infinities as Python writes them."""
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)


def keep_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a file of JSON lines without the rows that `keep` refuses."""
    write_atomically(path, json_lines(row for row in read_json_lines(path) if keep(row)))
