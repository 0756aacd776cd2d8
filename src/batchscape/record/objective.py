"""What a search makes small, by the record of one run."""

from __future__ import annotations

import math

from batchscape.config import Objective
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, StopReason

__all__ = ["objective_of"]


def objective_of(name: Objective, spec: RunSpec, status: RunStatus, *, timed: bool) -> float | None:
    """Return what a search makes small, of a run that is completed.

    Parameters
    ----------
    name : str
    spec : RunSpec
    status : RunStatus
    timed : bool
        Whether its times count.

    Returns
    -------
    float or None
        Infinite where a target was not reached; None where it was not measured.
    """
    summary = status.summary
    if name in {"loss", "peak_allocated_gib"}:
        value: float | None = summary["final_eval_loss" if name == "loss" else name]
        return value
    if status.stop_reason is not StopReason.TARGET:
        return math.inf
    if name in {"samples_to_target", "steps_to_target"}:
        return float(summary["samples" if name == "samples_to_target" else "optimizer_steps"])
    # What the run recorded counts its warm-up and its slow steps, which no median does.
    if not timed or summary["train_time_s"] is None:
        return None
    devices = 1 if name == "time_to_target_s" else spec.geometry.data_parallel_size / 3600
    return float(summary["train_time_s"]) * devices
