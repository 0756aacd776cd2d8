"""The time of day by a clock that never jumps, the same in all processes of a launch.

What ended a run first is found by comparing times of several processes. The clock of the wall may
be set back or ahead at any moment; the clock of the machine only runs. A launcher reads both once,
and hands the difference to every process that it starts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_VARIABLE = "BATCHSCAPE_CLOCK_OFFSET_S"
# Counts on while the machine sleeps, where the system has such a clock.
_RUNNING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return the time in seconds since the epoch, as the launcher's wall clock had it at its start.

    Returns
    -------
    float
        Never less than what any process of the same launch was given before.
    """
    return _OFFSET_S + time.clock_gettime(_RUNNING)


def file_age_s(path: Path) -> float:
    """Return how long ago a file was written; 0 where it is gone, or the clock has gone back."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0


def _offset_s() -> float:
    try:
        return float(os.environ[_VARIABLE])
    except (KeyError, ValueError):
        offset_s = time.time() - time.clock_gettime(_RUNNING)
        os.environ[_VARIABLE] = repr(offset_s)
        return offset_s


_OFFSET_S = _offset_s()
