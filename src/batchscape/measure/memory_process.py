"""Memory of this process, as the operating system tells."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from batchscape.measure.memory_report import GIB

__all__ = ["ProcessMemory", "ResidentPeak", "process_memory"]


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


class ResidentPeak:
    """Highest resident memory of this process above that of the beginning.

    The system's own high-water mark is used, so that nothing is missed between two looks; what
    a process does aside, between `settle` and `resume`, raises the mark but does not count.
    """

    def __init__(self) -> None:
        self._before_gib = self._peak_gib = _rss_gib()
        self._aside_gib = _peak_rss_gib() or 0.0

    def settle(self) -> None:
        """Take in what was reached until now: what follows is aside."""
        self._peak_gib = max(self._peak_gib, self._reached_gib())

    def resume(self) -> None:
        """Count again from here."""
        self._aside_gib = max(self._aside_gib, _peak_rss_gib() or 0.0)

    def taken_gib(self) -> float:
        """Return the peak until now, in GiB above the beginning."""
        return max(self._peak_gib, self._reached_gib()) - self._before_gib

    def _reached_gib(self) -> float:
        mark_gib = _peak_rss_gib() or 0.0
        # Below an older mark it has not moved, and only what is held now is known.
        return mark_gib if mark_gib > self._aside_gib else _rss_gib()


def _rss_gib() -> float:
    return float(psutil.Process().memory_info().rss) / GIB


def _peak_rss_gib() -> float | None:
    """Return the kernel's high-water mark of resident memory, `VmHWM` of proc_pid_status(5)."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024 / GIB
