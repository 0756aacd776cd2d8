"""What a trial came to, by the folders of its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from batchscape.config import Objective
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status, StopReason
from batchscape.record.timing import why_run_untimed

__all__ = ["Outcome", "outcome_of"]

_CANNOT = {Status.DIVERGED, Status.OOM, Status.REJECTED}
"""What would happen again, and is no fault of the machine: infinitely bad."""


_NOT_MEASURED = "not measured"


class Outcome(NamedTuple):
    """How a trial ended."""

    state: str
    """`completed`, or the status of the run that did not."""
    values: tuple[float, ...] | None
    """Mean over its runs of each objective, infinite where one of them has none; None: the trial
    is not over, or tells nothing."""
    memory_gib: float | None
    """Largest peak of allocated memory of its runs; None: not measured."""
    reason: str | None = None
    """Why it tells nothing."""

    @property
    def is_over(self) -> bool:
        """Whether it is told, and not run again."""
        return self.values is not None or self.state in {str(Status.PRUNED), _NOT_MEASURED}


def outcome_of(
    specs: Sequence[RunSpec], sweep: SweepFolder, objectives: Sequence[Objective]
) -> Outcome:
    """Read how a trial ended.

    Parameters
    ----------
    specs : sequence of RunSpec
        Its runs; empty: no geometry could be built.
    sweep : SweepFolder
        Where they are.
    objectives : sequence of str
    """
    if not specs:
        return Outcome(str(Status.REJECTED), (math.inf,) * len(objectives), None)
    rows: list[tuple[float, ...]] = []
    state, memory = str(Status.COMPLETED), list[float]()
    for spec in specs:
        folder = sweep.run(spec.run_id)
        status = RunStatus.read(folder.status)
        if status.status is Status.PRUNED:
            return Outcome(str(Status.PRUNED), None, None, status.reason)
        if status.status in _CANNOT:
            state = str(status.status)
            rows.append((math.inf,) * len(objectives))
            continue
        if status.status is not Status.COMPLETED:
            return Outcome(str(status.status), None, None, status.reason)
        peak = status.summary.get("peak_allocated_gib")
        memory += [] if peak is None else [peak]
        untimed = why_run_untimed(folder, status)
        values = [_value(name, spec, status, timed=untimed is None) for name in objectives]
        if None in values:
            lacks = objectives[values.index(None)]
            return Outcome(_NOT_MEASURED, None, None, f"{spec.run_id} has no {lacks}: {untimed}")
        rows.append(tuple(value for value in values if value is not None))
    means = tuple(math.fsum(column) / len(rows) for column in zip(*rows, strict=True))
    return Outcome(state, means, max(memory, default=None))


def _value(name: Objective, spec: RunSpec, status: RunStatus, *, timed: bool) -> float | None:
    """Return one objective of a completed run; None where it was not measured."""
    summary = status.summary
    if name in {"loss", "peak_allocated_gib"}:
        value: float | None = summary["final_eval_loss" if name == "loss" else name]
        return value
    if status.stop_reason is not StopReason.TARGET:
        return math.inf
    if name in {"samples_to_target", "steps_to_target"}:
        return float(summary["samples" if name == "samples_to_target" else "optimizer_steps"])
    if not timed or summary["step_time_s"] is None:
        return None
    seconds = float(summary["optimizer_steps"]) * float(summary["step_time_s"])
    devices = 1 if name == "time_to_target_s" else spec.geometry.data_parallel_size / 3600
    return seconds * devices
