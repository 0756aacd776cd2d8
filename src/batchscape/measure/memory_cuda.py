"""Peak memory on CUDA: the allocator counts during the real run, at no cost."""

from __future__ import annotations

import os

import torch

from batchscape.device import processes_on
from batchscape.measure.memory_report import (
    OUTSIDE,
    AllocatedBytes,
    MemoryReport,
)

_METHOD = "cuda allocator"


class CudaMemory:
    """The caching allocator's own statistics, its peaks reset at the edges of phases.

    The allocator counts when the host asks, so nothing here waits for the device. Allocated
    bytes are those of tensors, rounded up to blocks of 512 bytes; reserved bytes are what the
    allocator took from the driver.

    The allocator keeps what an evaluation has reserved, which would then pass for the training's.
    Before a steady step was seen, what is cached is given back instead: such steps are warm-up.
    Afterwards reserved memory is read no more, so that no timed step has to reserve it anew.

    Torch keeps what cuBLAS works in (8 MiB for each of its handles, 32 on Hopper) from the first
    product to the end, and counts it as allocated. How much that is, is what is missing once it was
    given back, after the last phase.

    Notes
    -----
    Source: "Memory management" and "cuBLAS workspaces",
    https://docs.pytorch.org/docs/stable/notes/cuda.html; `num_alloc_retries` of
    `torch.cuda.memory_stats`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = OUTSIDE
        self._phases: dict[str, AllocatedBytes] = {}
        self._peak_reserved: int | None = None
        self._device_used: int | None = None
        self._reserved_before = 0
        """When what is no training step began, in bytes."""
        self._has_been_steady = False
        self._reserved_by_others = False
        self._retries = 0
        self._retries_before = 0
        """When the current phase began."""

    def phase(self, name: str) -> None:
        """Begin one of `PHASES`, or `OUTSIDE`, which ends the one before.

        Naming the current one changes nothing.
        """
        if name == self._phase:
            return
        torch.cuda.init()  # peaks cannot be reset before; once only, later calls do nothing
        if self._phase == OUTSIDE:
            if torch.cuda.memory_reserved(self._device) > self._reserved_before:
                if self._has_been_steady:
                    self._reserved_by_others = True
                else:
                    torch.cuda.empty_cache()
        else:
            self._read()
        if name == OUTSIDE:
            self._reserved_before = torch.cuda.memory_reserved(self._device)
        if name == "after_model":
            # The examination of the model has computed products already.
            _release_cublas_workspace(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._retries_before = _retries_so_far(self._device)
        self._phase = name

    def report(self) -> MemoryReport:
        """End the current phase and return what was measured."""
        self.phase(OUTSIDE)
        return MemoryReport.from_bytes(
            _METHOD,
            self._phases,
            peak_reserved=self._peak_reserved,
            device_used=self._device_used,
            workspace=_release_cublas_workspace(self._device) if self._phases else None,
            allocator_retries=self._retries,
        )

    def _read(self) -> None:
        phase = self._phases.setdefault(self._phase, AllocatedBytes())
        phase.see(torch.cuda.max_memory_allocated(self._device))
        phase.see(torch.cuda.memory_allocated(self._device))
        self._retries += _retries_so_far(self._device) - self._retries_before
        if self._reserved_by_others:
            return
        reserved = torch.cuda.max_memory_reserved(self._device)
        self._peak_reserved = max(reserved, self._peak_reserved or 0)
        if self._phase == "steady":
            self._has_been_steady = True
            self._device_used = _used_by_this_process(self._device)


def _retries_so_far(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def _release_cublas_workspace(device: torch.device) -> int | None:
    """Free the workspace of cuBLAS and return its bytes; None where torch cannot."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # no public name
    if clear is None:
        return None
    before = torch.cuda.memory_allocated(device)
    clear()
    return before - torch.cuda.memory_allocated(device)


def _used_by_this_process(device: torch.device) -> int | None:
    """Return the bytes that the driver counts for this process; None where it cannot tell.

    In a container NVML may number processes as the host does; then this process is not found, or
    another one is, which is told by holding less than our allocator does.
    """
    processes = processes_on(device)
    reserved = torch.cuda.memory_reserved(device)
    counts = [process.usedGpuMemory for process in processes or () if process.pid == os.getpid()]
    return max((n for n in counts if n is not None and n >= reserved), default=None)
