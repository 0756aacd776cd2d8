"""Whether the machine was free: how long a rank was on a core, and how long it waited for one."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Contention", "CoreWaits", "TreeWaits"]

_PROC = Path("/proc")
_SCHEDSTAT = "schedstat"
"""Nanoseconds on a core, nanoseconds ready and without one, and time slices: of the main thread in
the folder of a process, of each thread in those below its `task`.
Source: https://docs.kernel.org/scheduler/sched-stats.html, section "/proc/<pid>/schedstat"."""
_LARGEST_SHARE = 0.01
"""Share of the time that looking at other processes may take: it takes a core from them."""


class Contention(NamedTuple):
    """What other work took from this process since it was last asked."""

    involuntary_switches: int
    """Times the system took the core away."""
    core_wait_s: float | None
    """Time that the main thread was ready and had no core; None where the system does not tell."""
    processor_time_s: float | None
    """Time that the threads of this process were on a core, added up."""


class CoreWaits:
    """Counts waits for a core, from one call to the next; a call costs a few microseconds."""

    def __init__(self) -> None:
        try:
            self._schedstat: int | None = os.open(_PROC / "self" / _SCHEDSTAT, os.O_RDONLY)
        except OSError:
            self._schedstat = None
        self._switches, self._waited_ns = self._read()
        self._processor_s = time.process_time()

    def since_last(self) -> Contention:
        """Return what has happened since the last call, or since the start."""
        switches, waited_ns = self._read()
        lost = None
        if waited_ns is not None and self._waited_ns is not None:
            lost = (waited_ns - self._waited_ns) / 1e9
        processor_s = time.process_time()
        found = Contention(switches - self._switches, lost, processor_s - self._processor_s)
        self._switches, self._waited_ns = switches, waited_ns
        self._processor_s = processor_s
        return found

    def _read(self) -> tuple[int, int | None]:
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        if self._schedstat is None:
            return switches, None
        return switches, _waited_ns(os.pread(self._schedstat, 128, 0))

    def close(self) -> None:
        """Give the file back."""
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None


class TreeWaits:
    """How much of the time the processes below another one waited for a core.

    Between two looks counts the wait of the thread that waited longest: ranks and their threads
    wait for the slowest of them, and one that sleeps waits for no core. A thread that begins
    between two looks counts from its begin, one that ends up to the last look at it.

    Parameters
    ----------
    root : int
        Process that they are below; it does not count itself.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._known_ns: dict[int, int] = {}
        self._due = 0.0
        # Times of looks, and the waits up to them.
        self._times_s = [time.monotonic()]
        self._waited_s = [0.0]

    def look(self) -> None:
        """Read what every thread has waited, no oftener than costs a hundredth of the time."""
        if time.monotonic() < self._due:
            return
        spent = time.thread_time()
        try:
            own = _PROC / str(self._root)
            _waited_ns((own / _SCHEDSTAT).read_bytes())
            waited = dict(_waits_below(own))
        except OSError:
            return  # it has ended, or the system does not tell
        longest_ns = 0
        for thread, total_ns in waited.items():
            before = self._known_ns.get(thread, 0)
            # The number of a thread that has ended may be that of a new one.
            longest_ns = max(longest_ns, total_ns - before if total_ns >= before else total_ns)
        self._known_ns |= waited
        now = time.monotonic()
        self._times_s.append(now)
        self._waited_s.append(self._waited_s[-1] + longest_ns / 1e9)
        self._due = now + (time.thread_time() - spent) / _LARGEST_SHARE

    def share_since(self, begin_s: float) -> float | None:
        """Return the share of the time that was waited, up to the last look.

        Parameters
        ----------
        begin_s : float
            Instant, by `time.monotonic`; at the latest that of the last look but one.

        Returns
        -------
        float or None
            None where no look has told anything.
        """
        if len(self._times_s) == 1:
            return None
        begin_s = max(min(begin_s, self._times_s[-2]), self._times_s[0])
        after = max(bisect_left(self._times_s, begin_s), 1)
        early_s, late_s = self._times_s[after - 1 : after + 1]
        early, late = self._waited_s[after - 1 : after + 1]
        at_begin = early + (late - early) * (begin_s - early_s) / (late_s - early_s)
        # A wait counts once it is over, and may have begun before.
        return min((self._waited_s[-1] - at_begin) / (self._times_s[-1] - begin_s), 1.0)


def _waited_ns(schedstat: bytes) -> int:
    return int(schedstat.split()[1])


def _waits_below(process: Path) -> Iterator[tuple[int, int]]:
    """Yield each thread of the processes below one, with the nanoseconds that it has waited."""
    for task in (process / "task").iterdir():
        for pid in (task / "children").read_bytes().split():
            child = process.parent / pid.decode()
            # Processes and threads end while they are looked at.
            with contextlib.suppress(OSError):
                for thread in (child / "task").iterdir():
                    with contextlib.suppress(OSError):
                        yield int(thread.name), _waited_ns((thread / _SCHEDSTAT).read_bytes())
                yield from _waits_below(child)
