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

    def phase(self, name: str) -> None:
        """Begin a phase; see `MemoryMeter.phase`."""
        check_phase(name)
        if name == self._phase:
            return
        self._read()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._phase = name

    def report(self) -> MemoryReport:
        """End the current phase and return what was measured, with the driver's word of now."""
        self.phase(OUTSIDE)
        return MemoryReport.from_bytes(
            _METHOD,
            self._phases,
            reserved=self._peak_reserved,
            device_used=_used_by_this_process(self._device),
        )

    def _read(self) -> None:
        if self._phase == OUTSIDE:
            return
        seen = self._phases.setdefault(self._phase, AllocatedBytes())
        seen.see(torch.cuda.max_memory_allocated(self._device))
        seen.see(torch.cuda.memory_allocated(self._device))
        reserved = torch.cuda.max_memory_reserved(self._device)
        self._peak_reserved = max(reserved, self._peak_reserved or 0)


def _used_by_this_process(device: torch.device) -> int | None:
    """Return the bytes that the driver counts for this process; None where it cannot tell.

    Without permission, in slices of a device (MIG) and on some systems, NVML gives no figure. In
    a container it may number processes as the host does; then this process is not found, or
    another one is, which is told by holding less than our allocator does.

    Notes
    -----
    Source: `nvmlDeviceGetComputeRunningProcesses`, NVML API reference,
    https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html.
    """
    import pynvml  # only where there is a CUDA device to ask about

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        pynvml.nvmlInit()
        try:
            # CUDA_VISIBLE_DEVICES renumbers the devices for torch, and not for NVML.
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    reserved = torch.cuda.memory_reserved(device)
    used = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    told = [count for count in used if count is not None and count >= reserved]
    return max(told, default=None)
