"""Services of the operating system for processes, and its data on processes and the processor.

Only Linux has all of them; elsewhere nothing is done, and memory is not known.
"""

from __future__ import annotations

import ctypes
import platform
import re
import signal
import sys
from pathlib import Path

GIB = 2**30
"""Bytes of a GiB."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends; `PR_SET_PDEATHSIG` of prctl(2)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants; `PR_SET_CHILD_SUBREAPER` of prctl(2)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def reported_memory(pid: int | None = None) -> dict[str, int]:
    """Return the memory of a process in bytes, by names of proc_pid_status(5); empty: not known."""
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text()
    except OSError:
        return {}
    fields = re.findall(r"^(Vm\w+):\s+(\d+) kB$", status, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in fields}


def processor_name() -> str:
    """Return the model of the processor, or at least its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    models = (value.strip() for key, _, value in pairs if key.strip() == "model name")
    return next(models, "") or platform.processor() or platform.machine()
