"""Memory of a program's processes, by data-parallel rank.

A launcher such as torchrun tells its workers their rank by the variable RANK, which they and
their own children (loaders of data) have in their environment. A program whose processes have no
RANK is one rank, with all of its processes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from batchscape.cuda_devices import handle_of, processes_on
from batchscape.system import GIB, reported_memory

_LARGEST_SHARE = 0.01
"""Share of the time that looking may take: it takes a core from the program."""
_LARGEST_GROWTH = 0.25
"""Longest time to the next look, by the time since the first."""
_SHORTEST_S, _LONGEST_S = 0.25, 30.0
_UNRANKED = -1
"""Stands for the rank of processes without RANK in their environment."""


@dataclass
class RankMemory:
    """Memory of one data-parallel rank so far, in GiB."""

    rss_gib: float = 0.0
    """Resident at the last look, shared pages included."""
    uss_gib: float = 0.0
    """Resident at the last look, in no other process."""
    peak_uss_gib: float = 0.0
    """Highest of the same at any look."""
    peak_rss_gib: float = 0.0
    """Sum over its processes of the kernel's high-water marks; where there is none, the highest
    resident memory at any look."""
    device_used_gib: float | None = None
    """Highest memory on CUDA devices at any look, as the driver tells; None: never seen."""


class TreeMemory:
    """Samples the memory of a program's processes in at most 1 % of the time."""

    def __init__(
        self, guard_pid: int, driver: Callable[[], Mapping[int, int]] | None = None
    ) -> None:
        self._guard_pid = guard_pid
        self._driver = driver
        self._rank_of: dict[int, int] = {}
        """By every process of the program that was ever seen."""
        self._marks: dict[int, dict[int, float]] = {}
        self._begin_s = time.monotonic()
        self._next_look_s = 0.0
        self._has_ranks = False
        self.ranks: dict[int, RankMemory] = {}
        """By data-parallel rank."""
        self.foreign_processes: int | None = None
        """Processes on its CUDA devices that are not the program's, the most at any look; None
        where the driver does not list the program's own, as in a container, where it numbers them
        as the host does."""
        self.world_size: int | None = None
        """Highest WORLD_SIZE in the environments of the processes; None where none has it."""

    def look(self) -> None:
        """Take the memory of every process, if that is due."""
        if time.monotonic() < self._next_look_s:
            return
        cpu_before_s = time.thread_time()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._look()
        now = time.monotonic()
        pause = (time.thread_time() - cpu_before_s) / _LARGEST_SHARE
        # More often at the start: a program may be short, and its ranks start one after another.
        longest = min((now - self._begin_s) * _LARGEST_GROWTH, _LONGEST_S)
        self._next_look_s = now + max(min(pause, longest), _SHORTEST_S)

    def _look(self) -> None:
        # Asked first, so that a process that begins meanwhile is known as the program's.
        device_bytes = self._driver() if self._driver is not None else {}
        by_rank: dict[int, list[psutil.Process]] = {}
        for process in psutil.Process(self._guard_pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                by_rank.setdefault(self._rank(process), []).append(process)
        self._has_ranks |= not by_rank.keys() <= {_UNRANKED}
        if self._has_ranks:
            # The process without a rank is the launcher of the others.
            by_rank.pop(_UNRANKED, None)
            self.ranks.pop(_UNRANKED, None)
        if device_bytes.keys() & self._rank_of.keys():
            foreign_count = len(device_bytes.keys() - self._rank_of.keys())
            self.foreign_processes = max(foreign_count, self.foreign_processes or 0)
        for rank, processes in by_rank.items():
            self._add(rank, processes, device_bytes)

    def _rank(self, process: psutil.Process) -> int:
        if self._rank_of.get(process.pid, _UNRANKED) == _UNRANKED:
            # Without a rank it is asked again: a new process first has its parent's environment.
            environment = process.environ()
            rank, size = (environment.get(name, "") for name in ("RANK", "WORLD_SIZE"))
            self._rank_of[process.pid] = int(rank) if rank.isdecimal() else _UNRANKED
            if rank.isdecimal() and size.isdecimal():
                self.world_size = max(int(size), self.world_size or 0)
        return self._rank_of[process.pid]

    def _add(
        self, rank: int, processes: list[psutil.Process], device_bytes: Mapping[int, int]
    ) -> None:
        rss = uss = 0.0
        device = 0
        marks = self._marks.setdefault(rank, {})
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                memory = process.memory_full_info()
                if not memory.uss:
                    continue  # it is ending, and its memory is already free
                rss += memory.rss / GIB
                uss += memory.uss / GIB
                marks[process.pid] = reported_memory(process.pid).get("VmHWM", memory.rss) / GIB
                device += device_bytes.get(process.pid, 0)
        if not uss:
            return
        of_rank = self.ranks.setdefault(rank, RankMemory())
        of_rank.rss_gib, of_rank.uss_gib = rss, uss
        of_rank.peak_uss_gib = max(of_rank.peak_uss_gib, uss)
        peak_rss_gib = sum(marks.get(process.pid, 0.0) for process in processes)
        of_rank.peak_rss_gib = max(of_rank.peak_rss_gib, peak_rss_gib)
        if device:
            of_rank.device_used_gib = max(of_rank.device_used_gib or 0.0, device / GIB)


def driver_memory() -> Callable[[], Mapping[int, int]] | None:
    """Return a function that asks NVML for the memory of processes on the visible CUDA devices.

    Devices are those of `CUDA_VISIBLE_DEVICES`, by UUID. None where there are none, or the driver
    does not tell.
    """
    uuids = [u for u in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if u]
    if not uuids or any(handle_of(uuid) is None for uuid in uuids):
        return None

    def ask() -> Counter[int]:
        bytes_by_process: Counter[int] = Counter()
        for uuid in uuids:
            for process in processes_on(uuid) or ():
                bytes_by_process[process.pid] += process.usedGpuMemory or 0
        return bytes_by_process

    return ask
