"""Peak memory of a rank: a probe before training on the CPU, the allocator's word on CUDA."""

from __future__ import annotations

import time

import torch

from batchscape.measure.memory import CpuProbe, CudaMemory, MemoryReport
from batchscape.train.loop import Training

__all__ = ["MemoryPhases"]

_PROBE_OPTIMIZER_STEPS = 3
"""The first makes the optimizer's state, the later ones are steady."""


class MemoryPhases:
    """Measures memory in the way that suits the device.

    The CPU's allocator keeps no statistics, so the very same steps are rehearsed under a tracker
    and forgotten before the timed training starts. CUDA's allocator counts for free.

    Parameters
    ----------
    device : torch.device
    measure : bool
        Whether to measure at all.
    """

    def __init__(self, device: torch.device, *, measure: bool) -> None:
        self.probe_s = 0.0
        self._measure = measure
        self._cuda = CudaMemory(device) if measure and device.type == "cuda" else None
        self._probed: MemoryReport | None = None

    def rehearse(self, training: Training) -> None:
        """Run the probe, where the device needs one."""
        if not self._measure or self._cuda is not None:
            return
        began = time.perf_counter()
        with CpuProbe() as probe:
            training.rehearse(probe.phase, _PROBE_OPTIMIZER_STEPS)
        self._probed = probe.report()
        self.probe_s = time.perf_counter() - began

    def enter(self, phase: str) -> None:
        """Begin a phase of the real training."""
        if self._cuda is not None:
            self._cuda.phase(phase)

    def report(self) -> MemoryReport | None:
        """Return what was measured; None where nothing was asked for."""
        return self._probed if self._cuda is None else self._cuda.report()
