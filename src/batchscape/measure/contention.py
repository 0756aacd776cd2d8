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


_MOST_LOOKS = 256
"""Looks that are kept: all of the last seconds, fewer of what is longer ago."""
_Thread = tuple[int, int]
"""Number of a thread, and how many have had it before."""


class _Schedstat(NamedTuple):
    """What a thread has taken since its begin."""

    processor_ns: int
    waited_ns: int


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
        return switches, _schedstat(os.pread(self._schedstat, 128, 0)).waited_ns

    def close(self) -> None:
        """Give the file back."""
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None


class _Look(NamedTuple):
    """What was so at one instant."""

    at_s: float
    waited_ns: dict[_Thread, int]
    """Of each thread, since its begin."""
    processor_ns: int
    """Of all threads so far, added up."""


class TreeWaits:
    """How much of the time the processes below another one waited for a core, and were on one.

    Of the waits within the time that is asked about counts that of the thread that waited longest:
    ranks and their threads wait for the slowest of them, and one that sleeps waits for no core. A
    thread that begins between two looks counts from its begin, one that ends up to the last look
    at it.

    Parameters
    ----------
    root : int
        Process that they are below; it does not count itself.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._known: dict[_Thread, _Schedstat] = {}
        self._generation: dict[int, int] = {}
        self._due = 0.0
        self._looks = [_Look(time.monotonic(), {}, 0)]

    def look(self) -> None:
        """Read what every thread has waited, no oftener than costs a hundredth of the time."""
        if time.monotonic() < self._due:
            return
        spent = time.thread_time()
        try:
            own = _PROC / str(self._root)
            _schedstat((own / _SCHEDSTAT).read_bytes())
            read = dict(_threads_below(own))
        except OSError:
            return  # it has ended, or the system does not tell
        found: dict[_Thread, _Schedstat] = {}
        processor_ns = self._looks[-1].processor_ns
        for number, told in read.items():
            thread = number, self._generation.get(number, 0)
            before = self._known.get(thread, _Schedstat(0, 0))
            if told.waited_ns < before.waited_ns or told.processor_ns < before.processor_ns:
                # The number of a thread that has ended may be that of a new one.
                self._generation[number] = thread[1] + 1
                thread, before = (number, thread[1] + 1), _Schedstat(0, 0)
            found[thread] = told
            processor_ns += told.processor_ns - before.processor_ns
        self._known |= found
        now = time.monotonic()
        waited_ns = {thread: told.waited_ns for thread, told in found.items()}
        self._looks.append(_Look(now, waited_ns, processor_ns))
        if len(self._looks) > _MOST_LOOKS:
            self._thin_out()
        self._due = now + (time.thread_time() - spent) / _LARGEST_SHARE

    def _thin_out(self) -> None:
        """Forget every second look of the older half; what only it saw is seen by the next."""
        for index in range(1, _MOST_LOOKS // 4):
            waited_ns, after = self._looks[index].waited_ns, self._looks[index + 1]
            ended = [item for item in waited_ns.items() if item[0] not in after.waited_ns]
            after.waited_ns.update([max(ended, key=lambda item: item[1])] if ended else [])
            del self._looks[index]

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
        if len(self._looks) == 1:
            return None
        begin_s, after, part = self._begin(begin_s)
        early, late = self._looks[after - 1 : after + 1]
        at_end: dict[_Thread, int] = {}
        for look in self._looks[after:]:
            at_end |= look.waited_ns
        longest_ns = 0.0
        for thread, waited_ns in at_end.items():
            before_ns = early.waited_ns.get(thread, 0)
            at_begin_ns = before_ns + part * (late.waited_ns.get(thread, before_ns) - before_ns)
            longest_ns = max(longest_ns, waited_ns - at_begin_ns)
        # A wait counts once it is over, and may have begun before.
        return min(longest_ns / 1e9 / (self._looks[-1].at_s - begin_s), 1.0)

    def processors_since(self, begin_s: float) -> float | None:
        """Return how many cores all threads were on, in the mean; as `share_since`."""
        if len(self._looks) == 1:
            return None
        begin_s, after, part = self._begin(begin_s)
        early, late = self._looks[after - 1 : after + 1]
        at_begin_ns = early.processor_ns + part * (late.processor_ns - early.processor_ns)
        last = self._looks[-1]
        return (last.processor_ns - at_begin_ns) / 1e9 / (last.at_s - begin_s)

    def _begin(self, begin_s: float) -> tuple[float, int, float]:
        """Return an instant that was looked at, the look after it, and its part of the way."""
        begin_s = max(min(begin_s, self._looks[-2].at_s), self._looks[0].at_s)
        after = max(bisect_left(self._looks, begin_s, key=lambda look: look.at_s), 1)
        early, late = self._looks[after - 1 : after + 1]
        return begin_s, after, (begin_s - early.at_s) / (late.at_s - early.at_s)


def _schedstat(content: bytes) -> _Schedstat:
    processor_ns, waited_ns = content.split()[:2]
    return _Schedstat(int(processor_ns), int(waited_ns))


def _threads_below(process: Path) -> Iterator[tuple[int, _Schedstat]]:
    """Yield each thread of the processes below one, with what it has taken."""
    for task in (process / "task").iterdir():
        for pid in (task / "children").read_bytes().split():
            child = process.parent / pid.decode()
            # Processes and threads end while they are looked at.
            with contextlib.suppress(OSError):
                for thread in (child / "task").iterdir():
                    with contextlib.suppress(OSError):
                        yield int(thread.name), _schedstat((thread / _SCHEDSTAT).read_bytes())
                yield from _threads_below(child)
