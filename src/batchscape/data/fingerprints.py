"""Results of passes over large files, cached while the files stay as they are.

Hashing ten gigabytes takes longer than planning a sweep should. A file whose path, inode, size and
times of modification and change are those of an earlier pass is taken to have the same content.
Programs can set the time of modification, but not the time of change.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchscape.errors import ConfigError, RecordError
from batchscape.record.files import read_json, write_json
from batchscape.record.instants import file_age_s


def cache_folder() -> Path:
    """Return the folder that holds prepared data: `$XDG_CACHE_HOME/batchscape/data`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "batchscape" / "data"


_SETTLED_S = 2.0
"""A file that was modified this shortly before the pass may be modified once more without another
time of modification: clocks of file systems are coarse (up to 2 s on FAT)."""


def cached_result(path: Path, kind: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `compute` on a file, from the cache while the file stays as it is."""
    path = path.resolve()
    name = hashlib.sha256(f"{path}\0{kind}".encode()).hexdigest()[:32]
    cache_file = cache_folder() / "fingerprints" / f"{name}.json"
    state = file_state(path)
    with suppress(RecordError):  # there is no entry yet, or a torn one: the pass writes it
        entry = read_json(cache_file)
        if entry.get("file") == state:
            result: dict[str, Any] = entry["found"]
            return result
    is_settled = file_age_s(path) > _SETTLED_S
    result = compute()
    if file_state(path) != state:
        raise ConfigError(f"{path} was changed while it was read; start again when it is complete")
    if is_settled:
        with suppress(OSError):  # without an entry the next command makes the pass again
            write_json(cache_file, {"file": state, "kind": kind, "found": result})
    return result


def file_sha256(path: Path, advance: Callable[[int], object] | None = None) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits; each content is read once."""

    def compute() -> dict[str, Any]:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
                if advance is not None:
                    advance(len(block))
        return {"sha256": digest.hexdigest()}

    return str(cached_result(path, "sha256", compute)["sha256"])


def file_state(path: Path) -> dict[str, int | str]:
    """Return where a file is, and the fields of its status that change with its content."""
    status = path.stat()
    return {
        "path": str(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }
