"""The time of day by a clock that never jumps, the same in all processes of a launch.

The first cause of the end of a run is found by comparing times of several processes. The wall clock
may be set back or ahead at any moment, the clock of the machine never. A launcher reads both once,
and passes the difference to every process that it starts.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_VARIABLE = "BATCHSCAPE_CLOCK_OFFSET_S"
# A clock that continues while the machine sleeps, where the system has one.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return the seconds since the epoch, by the wall clock at the start of the launcher.

    Returns
    -------
    float
        Never less than an earlier time in any process of the same launch.
    """
    return _OFFSET_S + time.clock_gettime(_CLOCK)


def file_age_s(path: Path) -> float:
    """Return how long ago a file was written; 0 where it is gone, or the clock has gone back."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0


try:
    _OFFSET_S = float(os.environ[_VARIABLE])
except (KeyError, ValueError):
    _OFFSET_S = time.time() - time.clock_gettime(_CLOCK)
    os.environ[_VARIABLE] = repr(_OFFSET_S)
