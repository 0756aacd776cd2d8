"""Peak memory of a rank: a probe before training on the CPU, the allocator's statistics on CUDA."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from batchscape.measure.memory_cpu import CpuProbe
from batchscape.measure.memory_cuda import CudaMemory
from batchscape.measure.memory_limit import not_charged
from batchscape.measure.memory_process import PrivatePeak
from batchscape.measure.memory_report import MemoryReport
from batchscape.record.heartbeat import Phase, beat
from batchscape.train.loop import Training

_PROBE_OPTIMIZER_STEPS = 3
"""The first makes the optimizer's state, the later ones are steady."""


class MemoryPhases:
    """Measures memory in the way that suits the device, from right before the model is built.

    The CPU's allocator keeps no statistics, so the very same steps are rehearsed under a tracker
    and forgotten before the timed training starts. CUDA's allocator counts for free.
    """

    def __init__(self, device: torch.device, *, measure: bool) -> None:
        self.probe_s = 0.0
        self._private_peak = PrivatePeak() if device.type == "cpu" else None
        self._measure = measure
        self._cuda_memory = CudaMemory(device) if measure and device.type == "cuda" else None
        self._probe_report: MemoryReport | None = None

    def rehearse(self, training: Training) -> None:
        """Run the probe where the device needs one, after compilation, which it must not count."""
        if self._private_peak is None:
            return
        beat(Phase.COMPILATION)
        with self.uncounted():
            training.compile_ahead()
        beat(Phase.START)
        if not self._measure:
            return
        began = time.perf_counter()
        with ExitStack() as uncounted, CpuProbe() as probe:
            try:
                training.rehearse(probe.phase, _PROBE_OPTIMIZER_STEPS)
            finally:
                # To end and read the trace takes more memory than a small training.
                uncounted.enter_context(self.uncounted())
        self._probe_report = probe.report()
        self.probe_s = time.perf_counter() - began

    def enter(self, phase: str) -> None:
        """Begin a phase of the real training."""
        if self._cuda_memory is not None:
            self._cuda_memory.phase(phase)

    def peak_taken_gib(self) -> float | None:
        """Return the highest private memory above that of the beginning; None unless on a CPU."""
        return None if self._private_peak is None else self._private_peak.taken_gib()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do what is no part of the training: on a CPU no limit and no peak counts its memory."""
        if self._private_peak is not None:
            self._private_peak.settle()
        with not_charged():
            yield
        if self._private_peak is not None:
            self._private_peak.resume()

    def report(self) -> MemoryReport | None:
        """Return what was measured; None where nothing was asked for."""
        return self._probe_report if self._cuda_memory is None else self._cuda_memory.report()
