"""Figures of a memory measurement, the same for every way of measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from batchscape.system import GIB

PHASES = ("after_model", "first_backward", "first_optimizer_step", "steady")
"""Phases of a training in their order. One that is entered again keeps its higher peak."""

OUTSIDE = "outside"
"""Name for what is no training step, as an evaluation: it enters no figure."""


@dataclass
class AllocatedBytes:
    """Bytes of living tensors within one phase."""

    peak: int = 0
    """Highest."""
    last: int = 0
    """When the phase ended."""

    def see(self, allocated: int) -> None:
        """Record how much is allocated now."""
        self.peak = max(self.peak, allocated)
        self.last = allocated


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one rank, in GiB; None where it was not measured.

    Parameters
    ----------
    method : str
        Where the allocated and reserved figures come from.
    allocated_after_model_gib : float or None
        Tensors alive at the end of the phase `after_model`: parameters, buffers, and what an
        engine allocates when it wraps the model, such as DDP's buckets.
    peak_allocated_first_backward_gib : float or None
        Peak from the first micro-step through the last backward of the first optimizer step.
    peak_allocated_first_optimizer_step_gib : float or None
        Peak in the first update, which makes the optimizer's state.
    peak_allocated_steady_gib : float or None
        Peak over later, full optimizer steps.
    peak_allocated_gib : float or None
        The largest of the four above.
    peak_reserved_gib : float or None
        Peak of what the caching allocator held, in the same phases.
    device_used_gib : float or None
        Device memory of this process as the driver tells, CUDA context included.
    workspace_gib : float or None
        Part of the peaks after the model that cuBLAS works in: the same for every micro-batch.
    allocator_retries : int or None
        Times in the phases that an allocation had to wait for cached memory to be given back.
    problem : str or None
        Why there are no figures, when a measurement was tried and cannot be trusted.
    """

    method: str
    allocated_after_model_gib: float | None = None
    peak_allocated_first_backward_gib: float | None = None
    peak_allocated_first_optimizer_step_gib: float | None = None
    peak_allocated_steady_gib: float | None = None
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    device_used_gib: float | None = None
    workspace_gib: float | None = None
    allocator_retries: int | None = None
    problem: str | None = None

    @classmethod
    def from_bytes(
        cls,
        method: str,
        phases: Mapping[str, AllocatedBytes],
        *,
        reserved: int | None = None,
        device_used: int | None = None,
        workspace: int | None = None,
        retries: int | None = None,
    ) -> MemoryReport:
        """Return the report of the bytes of each phase; phases not entered stay None."""
        figures = {name: phases[name].peak for name in PHASES[1:] if name in phases}
        if "after_model" in phases:
            figures["after_model"] = phases["after_model"].last
        return cls(
            method=method,
            allocated_after_model_gib=_gib(figures.get("after_model")),
            peak_allocated_first_backward_gib=_gib(figures.get("first_backward")),
            peak_allocated_first_optimizer_step_gib=_gib(figures.get("first_optimizer_step")),
            peak_allocated_steady_gib=_gib(figures.get("steady")),
            peak_allocated_gib=_gib(max(figures.values(), default=None)),
            peak_reserved_gib=_gib(reserved),
            device_used_gib=_gib(device_used),
            workspace_gib=_gib(workspace),
            allocator_retries=retries,
        )

    def as_columns(self) -> dict[str, str | float | int | None]:
        """Return the cells of a row of `ranks`; a problem takes the place of the method."""
        cells = asdict(self)
        method, problem = cells.pop("method"), cells.pop("problem")
        return {"memory_method": method if problem is None else f"none: {problem}", **cells}


def _gib(count: int | None) -> float | None:
    return None if count is None else count / GIB
