"""Whether the machine was free: how often, and for how long, a rank had to wait for a core."""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

__all__ = ["Contention", "CoreWaits"]

_SCHEDSTAT = "/proc/self/schedstat"
"""Nanoseconds on a core, nanoseconds ready and without one, and time slices, of the main thread.
Source: https://docs.kernel.org/scheduler/sched-stats.html, section "/proc/<pid>/schedstat"."""


class Contention(NamedTuple):
    """What other work took from this process since it was last asked."""

    involuntary_switches: int
    """Times the system took the core away."""
    core_wait_s: float | None
    """Time that the main thread was ready and had no core; None where the system does not tell."""


class CoreWaits:
    """Counts waits for a core, from one call to the next; a call costs a few microseconds."""

    def __init__(self) -> None:
        try:
            self._schedstat: int | None = os.open(_SCHEDSTAT, os.O_RDONLY)
        except OSError:
            self._schedstat = None
        self._switches, self._waited_ns = self._read()

    def since_last(self) -> Contention:
        """Return what has happened since the last call, or since the start."""
        switches, waited_ns = self._read()
        lost = None
        if waited_ns is not None and self._waited_ns is not None:
            lost = (waited_ns - self._waited_ns) / 1e9
        found = Contention(switches - self._switches, lost)
        self._switches, self._waited_ns = switches, waited_ns
        return found

    def _read(self) -> tuple[int, int | None]:
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        if self._schedstat is None:
            return switches, None
        return switches, int(os.pread(self._schedstat, 128, 0).split()[1])

    def close(self) -> None:
        """Give the file back."""
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None
