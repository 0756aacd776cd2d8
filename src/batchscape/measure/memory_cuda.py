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
        self._left_steady = False

    def phase(self, name: str) -> None:
        """Begin a phase; see `MemoryMeter.phase`."""
        check_phase(name)
        if name == self._phase:
            return
        torch.cuda.init()  # peaks cannot be reset before; once only, later calls do nothing
        self._read()
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

    def _read(self) -> None:
        if self._phase == OUTSIDE:
            return
        seen = self._phases.setdefault(self._phase, AllocatedBytes())
        seen.see(torch.cuda.max_memory_allocated(self._device))
        seen.see(torch.cuda.memory_allocated(self._device))
        if self._left_steady:
            # The allocator keeps what an evaluation has reserved: it would pass for the training's.
            return
        reserved = torch.cuda.max_memory_reserved(self._device)
        self._peak_reserved = max(reserved, self._peak_reserved or 0)
        if self._phase == "steady":
            self._device_used = _used_by_this_process(self._device)
            self._left_steady = True


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
