"""Services of the operating system for processes, and its data on processes and the processor.

Only Linux has all of them; elsewhere nothing is done, and memory is not known.
"""

from __future__ import annotations

import ctypes
import platform
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GIB = 2**30
"""Bytes of a GiB."""
_PROC = Path("/proc")
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


def threads() -> int:
    """Return the number of threads of this process, native ones included."""
    return len(list((_PROC / "self" / "task").iterdir()))


def die_first() -> None:
    """Let the system choose this process before others where memory runs out; proc(5)."""
    (_PROC / "self" / "oom_score_adj").write_text("500")


def forget_peak_resident() -> None:
    """Set the mark of resident memory (`VmHWM`) back to now; proc_pid_clear_refs(5)."""
    (_PROC / "self" / "clear_refs").write_text("5")


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below one; psutil would look at every process of the machine for it."""
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            for child in map(int, (task / "children").read_bytes().split()):
                yield child
                yield from descendants(child)


def schedstat(pid: int | None = None) -> Path:
    """Return the file of the main thread of a process that `read_wait_s` reads."""
    return _PROC / str(pid or "self") / "schedstat"


def read_wait_s(content: bytes) -> float:
    """Return how long a thread was ready and without a core, by the content of its `schedstat`.

    Source: https://docs.kernel.org/scheduler/sched-stats.html, section "/proc/<pid>/schedstat".
    """
    return int(content.split()[1]) / 1e9


def reported_memory(pid: int | None = None) -> dict[str, int]:
    """Return the memory of a process in bytes, by names of proc_pid_status(5); empty: not known."""
    try:
        status = (_PROC / str(pid or "self") / "status").read_text()
    except OSError:
        return {}
    fields = re.findall(r"^(Vm\w+):\s+(\d+) kB$", status, re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in fields}


def processor_name() -> str:
    """Return the model of the processor, or at least its architecture."""
    try:
        lines = (_PROC / "cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    models = (value.strip() for key, _, value in pairs if key.strip() == "model name")
    return next(models, "") or platform.processor() or platform.machine()
