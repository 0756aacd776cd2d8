"""Figures of a memory measurement, the same for every way of measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batchscape.system import GIB

PHASES = ("after_model", "first_backward", "first_optimizer_step", "steady")
"""Phases of a training in their order: the model is built, and wrapped by its engine; micro-steps
of the first optimizer step; its update, which makes the optimizer's state; later, full optimizer
steps. One that is entered again keeps its higher peak."""

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
    """Memory of one rank: columns of the table `ranks`, whose meanings are in `record.figures`.

    None stands for what was not measured.
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
    """Why there are no figures, when a measurement was tried and cannot be trusted."""

    @classmethod
    def from_bytes(
        cls,
        method: str,
        phases: Mapping[str, AllocatedBytes],
        *,
        allocator_retries: int | None = None,
        **others: int | None,
    ) -> MemoryReport:
        """Return the report of the bytes of each phase, and of others by their names without unit.

        Phases not entered stay None.
        """
        counts = {
            f"peak_allocated_{name}": phases[name].peak for name in PHASES[1:] if name in phases
        }
        if "after_model" in phases:
            counts["allocated_after_model"] = phases["after_model"].last
        others |= {**counts, "peak_allocated": max(counts.values(), default=None)}
        figures: dict[str, Any] = {
            f"{name}_gib": None if count is None else count / GIB for name, count in others.items()
        }
        return cls(method, allocator_retries=allocator_retries, **figures)

    def as_columns(self) -> dict[str, str | float | int | None]:
        """Return the cells of a row of `ranks`; a problem takes the place of the method."""
        cells = asdict(self)
        method, problem = cells.pop("method"), cells.pop("problem")
        return {"memory_method": method if problem is None else f"none: {problem}", **cells}
