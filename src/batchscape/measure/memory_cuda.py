"""Peak memory on CUDA: the allocator counts during the real run, at no cost."""

from __future__ import annotations

import os

import torch

from batchscape.measure.memory_report import (
    OUTSIDE,
    AllocatedBytes,
    MemoryReport,
    check_phase,
)
from batchscape.measure.nvml import ask_driver

__all__ = ["CudaMemory"]

_METHOD = "cuda allocator"


class CudaMemory:
    """The caching allocator's own statistics, its peaks reset at the edges of phases.

    The allocator counts when the host asks, so nothing here waits for the device. Allocated
    bytes are those of tensors, rounded up to blocks of 512 bytes; reserved bytes are what the
    allocator took from the driver.

    The allocator keeps what an evaluation has reserved, which would then pass for the training's.
    Before a steady step was seen, what is cached is given back instead: such steps are warm-up.
    Afterwards reserved memory is read no more, so that no timed step has to reserve it anew.

    Parameters
    ----------
    device : torch.device
        Of this rank, with an index.

    Notes
    -----
    Source: "Memory management", https://docs.pytorch.org/docs/stable/notes/cuda.html.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = OUTSIDE
        self._phases: dict[str, AllocatedBytes] = {}
        self._peak_reserved: int | None = None
        self._device_used: int | None = None
        self._reserved_before = 0
        """When what is no training step began, in bytes."""
        self._seen_steady = False
        self._reserved_by_others = False

    def phase(self, name: str) -> None:
        """Begin a phase; see `MemoryMeter.phase`."""
        check_phase(name)
        if name == self._phase:
            return
        torch.cuda.init()  # peaks cannot be reset before; once only, later calls do nothing
        if self._phase == OUTSIDE:
            self._leave_outside()
        else:
            self._read()
        if name == OUTSIDE:
            self._reserved_before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._phase = name

    def report(self) -> MemoryReport:
        """End the current phase and return what was measured."""
        self.phase(OUTSIDE)
        return MemoryReport.from_bytes(
            _METHOD,
            self._phases,
            reserved=self._peak_reserved,
            device_used=self._device_used,
        )

    def _leave_outside(self) -> None:
        if torch.cuda.memory_reserved(self._device) <= self._reserved_before:
            return
        if self._seen_steady:
            self._reserved_by_others = True
        else:
            torch.cuda.empty_cache()

    def _read(self) -> None:
        seen = self._phases.setdefault(self._phase, AllocatedBytes())
        seen.see(torch.cuda.max_memory_allocated(self._device))
        seen.see(torch.cuda.memory_allocated(self._device))
        if self._reserved_by_others:
            return
        reserved = torch.cuda.max_memory_reserved(self._device)
        self._peak_reserved = max(reserved, self._peak_reserved or 0)
        if self._phase == "steady":
            self._seen_steady = True
            self._device_used = _used_by_this_process(self._device)


def _used_by_this_process(device: torch.device) -> int | None:
    """Return the bytes that the driver counts for this process; None where it cannot tell.

    In a container NVML may number processes as the host does; then this process is not found, or
    another one is, which is told by holding less than our allocator does.

    Notes
    -----
    Source: `nvmlDeviceGetComputeRunningProcesses`, NVML API reference,
    https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html.
    """
    processes = ask_driver(
        device, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    )
    reserved = torch.cuda.memory_reserved(device)
    used = [process.usedGpuMemory for process in processes or () if process.pid == os.getpid()]
    told = [count for count in used if count is not None and count >= reserved]
    return max(told, default=None)
