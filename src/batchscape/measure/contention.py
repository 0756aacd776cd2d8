"""Whether the machine was free: how long a rank was on a core, and how long it waited for one."""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

import numpy as np
import psutil

from batchscape.system import descendants, read_wait_s, schedstat

_LARGEST_SHARE = 0.01
"""Share of the time that looking at other processes may take: it takes a core from them."""
_SHORTEST_S = 0.1
"""Time between two looks at least."""
_MOST_LOOKS = 1024
"""Looks that are kept: all of the last ones, fewer of what is longer ago."""


class _ProcessTimes(NamedTuple):
    """Waits and processor time of a process since its begin."""

    waited_s: float
    """Of its main thread."""
    processor_s: float
    """Of all its threads."""


_NOTHING = _ProcessTimes(0.0, 0.0)


class Contention(NamedTuple):
    """What other work took from this process since it was last asked."""

    core_wait_s: float | None
    """Time that the main thread was ready and had no core; None where the system does not tell."""
    processor_time_s: float | None
    """Time that the threads of this process were on a core, added up."""


class CoreWaits:
    """Counts waits for a core, from one call to the next; a call costs a few microseconds."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(schedstat(), os.O_RDONLY)
        self._waited_s = self._read()
        self._processor_s = time.process_time()

    def since_last(self) -> Contention:
        """Return what has happened since the last call, or since the start."""
        waited_s = self._read()
        wait_s = None
        if waited_s is not None and self._waited_s is not None:
            wait_s = waited_s - self._waited_s
        processor_s = time.process_time()
        contention = Contention(wait_s, processor_s - self._processor_s)
        self._waited_s, self._processor_s = waited_s, processor_s
        return contention

    def _read(self) -> float | None:
        return None if self._file is None else read_wait_s(os.pread(self._file, 128, 0))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class TreeWaits:
    """How much of the time the processes below another one waited for a core, and were on one.

    Between two looks the process counts that waited longest: ranks wait for the slowest of them at
    every step, and one that sleeps waits for no core.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._last_times: dict[psutil.Process, _ProcessTimes] = {}
        self._due = 0.0
        self._looks = [(time.monotonic(), 0.0, 0.0)]
        """Instant, and until then the longest waits and the time on cores, added up."""

    def look(self) -> None:
        """Ask what every process has taken, no oftener than costs a hundredth of the time."""
        if time.monotonic() < self._due:
            return
        look_began_s = time.thread_time()
        times_by_process = _process_times_below(self._root)
        now = time.monotonic()
        if times_by_process:
            before = {
                process: self._last_times.get(process, _NOTHING) for process in times_by_process
            }
            waits_s = (times_by_process[p].waited_s - before[p].waited_s for p in times_by_process)
            cores_s = (
                times_by_process[p].processor_s - before[p].processor_s for p in times_by_process
            )
            _, waited_s, on_cores_s = self._looks[-1]
            self._looks.append((now, waited_s + max(waits_s), on_cores_s + sum(cores_s)))
            self._last_times |= times_by_process
        if len(self._looks) > _MOST_LOOKS:
            del self._looks[1 : _MOST_LOOKS // 2 : 2]
        self._due = now + max((time.thread_time() - look_began_s) / _LARGEST_SHARE, _SHORTEST_S)

    def share_since(self, begin_s: float) -> float | None:
        """Return the share of the time that was waited, up to the last look."""
        share = self._rate_since(begin_s, 1)
        # A wait counts once it is over, and may have begun before.
        return None if share is None else min(share, 1.0)

    def processors_since(self, begin_s: float) -> float | None:
        """Return how many cores all processes were on, in the mean; as `share_since`."""
        return self._rate_since(begin_s, 2)

    def _rate_since(self, begin_s: float, column: int) -> float | None:
        if len(self._looks) == 1:
            return None
        at_s = [look[0] for look in self._looks]
        so_far_s = [look[column] for look in self._looks]
        begin_s = max(min(begin_s, at_s[-2]), at_s[0])
        at_begin_s = float(np.interp(begin_s, at_s, so_far_s))
        return (so_far_s[-1] - at_begin_s) / (at_s[-1] - begin_s)


def _process_times_below(root: int) -> dict[psutil.Process, _ProcessTimes]:
    """Return what each process below one has taken; nothing where the system does not tell."""
    times_by_process = {}
    for pid in descendants(root):
        # Processes end while they are looked at.
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            waited_s = read_wait_s(schedstat(pid).read_bytes())
            times = process.cpu_times()
            times_by_process[process] = _ProcessTimes(waited_s, times.user + times.system)
    return times_by_process
