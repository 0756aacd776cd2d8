"""Peak memory of a rank, by phase of the training, and memory of its process.

On CUDA the allocator keeps statistics (`CudaMemory`, during the real run). On CPU it keeps none,
so the same steps are rehearsed and forgotten before the timed training starts (`CpuProbe`).
"""

from __future__ import annotations

from batchscape.measure.memory_cpu import CpuProbe
from batchscape.measure.memory_cuda import CudaMemory
from batchscape.measure.memory_process import ProcessMemory, process_memory
from batchscape.measure.memory_report import OUTSIDE, PHASES, MemoryMeter, MemoryReport

__all__ = [
    "OUTSIDE",
    "PHASES",
    "CpuProbe",
    "CudaMemory",
    "MemoryMeter",
    "MemoryReport",
    "ProcessMemory",
    "process_memory",
]
