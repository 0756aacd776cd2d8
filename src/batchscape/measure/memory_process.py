"""Memory of this process, as the operating system tells."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from batchscape.measure.memory_report import GIB

__all__ = ["ProcessMemory", "process_memory"]


@dataclass(frozen=True)
class ProcessMemory:
    """Host memory of one process, in GiB.

    A rank is forked from a server that has loaded the libraries, so its resident memory counts
    pages that all ranks share: the unique part is what one more rank costs. Neither is the
    memory of tensors; an allocator may keep what was freed.

    Parameters
    ----------
    rss_gib : float
        Resident now, shared pages included.
    uss_gib : float
        Resident now and in no other process.
    peak_rss_gib : float or None
        Highest resident memory so far; None where the system does not tell.
    """

    rss_gib: float
    uss_gib: float
    peak_rss_gib: float | None


def process_memory() -> ProcessMemory:
    """Return the memory of this process; about 10 ms, so not within timed steps."""
    memory = psutil.Process().memory_full_info()
    return ProcessMemory(memory.rss / GIB, memory.uss / GIB, _peak_rss_gib())


def _peak_rss_gib() -> float | None:
    """Return the kernel's high-water mark of resident memory, `VmHWM` of proc_pid_status(5)."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024 / GIB
