"""Memory of this process, as the operating system tells."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from batchscape.system import GIB, forget_peak_resident, reported_memory


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
    memory, reported = psutil.Process().memory_full_info(), _ReportedMemory.read()
    peak = None if reported is None else max(reported.peak_resident, _BeforeReset.peak_rss) / GIB
    return ProcessMemory(memory.rss / GIB, memory.uss / GIB, peak)


class PrivatePeak:
    """Highest private writable memory that this process mapped, above that of the beginning.

    This is what `RLIMIT_DATA` counts. The kernel tells what is mapped now (`VmData`) and keeps no
    high-water mark of it, but two of what contains it: of resident memory (`VmHWM`) and of all
    that is mapped (`VmPeak`). So the highest is taken to be `VmData` now, and the smaller of what
    either mark lies above its own value now. Nothing that happens between two looks costs anything.

    What a process does aside, between `settle` and `resume`, does not count, nor what it keeps of
    it, which is how `not_charged` has it. Where the system has no such marks, or does not set the
    first one back, nothing is known.

    Notes
    -----
    Errs on the low side by memory that was mapped and never touched and is unmapped again, by
    pages of files (libraries, data) first read after the peak, and by the kernel's rounding of
    resident memory, some tens of pages a core. Errs on the high side only where both marks were
    set with other memory mapped that is gone at the next look, such as a file or shared memory.

    Source: proc_pid_status(5); proc_pid_clear_refs(5), where 5 sets `VmHWM` back.
    """

    def __init__(self) -> None:
        now = _ReportedMemory.read()
        self._base = 0 if now is None else now.data
        self._settled = self._base
        self._peak = 0
        self._is_known = _forget_peak_rss()

    def settle(self) -> None:
        """Record the peak until now; what follows, up to `resume`, does not count."""
        now = _ReportedMemory.read()
        if now is not None:
            self._peak = max(self._peak, now.highest_data - self._base)
            self._settled = now.data

    def resume(self) -> None:
        """Count again from here."""
        now = _ReportedMemory.read()
        if now is not None:
            self._base += max(now.data - self._settled, 0)
        self._is_known &= _forget_peak_rss()

    def taken_gib(self) -> float | None:
        """Return the peak until now, in GiB above the beginning; None where it is not known."""
        now = _ReportedMemory.read()
        if now is None or not self._is_known:
            return None
        return max(self._peak, now.highest_data - self._base) / GIB


class _BeforeReset:
    """Highest resident memory, in bytes, before the system's mark was last set back."""

    peak_rss: int = 0


@dataclass(frozen=True)
class _ReportedMemory:
    """Memory of this process in /proc, in bytes."""

    data: int
    resident: int
    peak_resident: int
    mapped: int
    peak_mapped: int

    @classmethod
    def read(cls) -> _ReportedMemory | None:
        fields = reported_memory()
        names = ("VmData", "VmRSS", "VmHWM", "VmSize", "VmPeak")
        if not fields.keys() >= set(names):
            return None
        return cls(*(fields[name] for name in names))

    @property
    def highest_data(self) -> int:
        """Highest `data` since the mark of resident memory was set back."""
        above = min(self.peak_resident - self.resident, self.peak_mapped - self.mapped)
        return self.data + max(above, 0)


def _forget_peak_rss() -> bool:
    """Set the system's mark of resident memory back to now; return whether it did."""
    before = _ReportedMemory.read()
    if before is None:
        return False
    _BeforeReset.peak_rss = max(_BeforeReset.peak_rss, before.peak_resident)
    try:
        forget_peak_resident()
    except OSError:
        return False
    return True
