"""A cgroup with little memory, made for a test: the system's out-of-memory killer is real."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

VERSION_1 = Path("/sys/fs/cgroup/memory")
VERSION_2 = Path("/sys/fs/cgroup")


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """Make a cgroup; yield the file that a process writes its number to, to join it."""
    version_1 = (VERSION_1 / "memory.limit_in_bytes").exists()
    folder = (VERSION_1 if version_1 else VERSION_2) / f"batchscape-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        where = f"root, or a cgroup of one's own at {folder.parent}"
        pytest.skip(f"lacks the right to make a cgroup (needs {where}): {error}")
    try:
        limit = folder / ("memory.limit_in_bytes" if version_1 else "memory.max")
        try:
            limit.write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"lacks the memory controller of cgroups ({limit.name}): {error}")
        for name in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            with suppress(OSError):
                swap = folder / name
                if swap.exists():
                    swap.write_text(str(limit_bytes if version_1 else 0))
        yield folder / "cgroup.procs"
    finally:
        with suppress(OSError):
            folder.rmdir()


def join(procs: str) -> None:
    """Move this process into the cgroup."""
    Path(procs).write_text(str(os.getpid()))
