"""The outcome of a trial, by the folders of its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from batchscape.config import Objective
from batchscape.errors import RecordError
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status, StopReason
from batchscape.record.tables import read_table
from batchscape.record.timing import why_run_untimed

_WITHOUT_VALUE = {Status.DIVERGED, Status.OOM, Status.REJECTED}
"""Ends that a repetition would have as well, and the machine does not cause: infinitely bad."""

NOT_MEASURED = "not measured"
"""State of a trial whose runs ended, but have no valid time."""


class TrialOutcome(NamedTuple):
    """How a trial ended."""

    state: str
    """`completed`, or the status of the run that did not."""
    value: float | None
    """Mean of the objective over its runs, infinite where a run has none; None: the trial is not
    over, or has no result."""
    reason: str | None = None
    """Why it has no value, or an infinite one."""

    @property
    def is_over(self) -> bool:
        """Whether it has a result, and is not run again."""
        return self.value is not None or self.state in {str(Status.PRUNED), NOT_MEASURED}


def outcome_of(
    runs: Sequence[RunSpec | str], sweep: SweepFolder, objective: Objective
) -> TrialOutcome:
    """Read how a trial ended.

    Parameters
    ----------
    runs : sequence of RunSpec or str
        Its runs; in place of a run the rule that it breaks.
    sweep : SweepFolder
        Folder of the runs.
    objective : str
    """
    specs = [run for run in runs if not isinstance(run, str)]
    if len(specs) < len(runs):
        reason = next(run for run in runs if isinstance(run, str))
        return TrialOutcome(str(Status.REJECTED), math.inf, reason)
    values: list[float] = []
    state, why = str(Status.COMPLETED), None
    for spec in specs:
        folder = sweep.run(spec.run_id)
        status = RunStatus.read(folder.status)
        if status.status is Status.PRUNED:
            return TrialOutcome(str(Status.PRUNED), None, status.reason)
        if status.status in _WITHOUT_VALUE:
            state, why = str(status.status), status.reason
            values.append(math.inf)
            continue
        if status.status is not Status.COMPLETED:
            return TrialOutcome(str(status.status), None, status.reason)
        untimed = why_run_untimed(folder, status)
        value = _value_of(objective, spec, status, timed=untimed is None)
        if value is None:
            return TrialOutcome(NOT_MEASURED, None, f"{spec.run_id} has no {objective}: {untimed}")
        values.append(value)
    return TrialOutcome(state, math.fsum(values) / len(values), why)


def _value_of(name: Objective, spec: RunSpec, status: RunStatus, *, timed: bool) -> float | None:
    """Return the objective of a completed run: infinite where it did not reach its target."""
    summary = status.summary
    if name in {"loss", "peak_allocated_gib"}:
        value: float | None = summary["final_eval_loss" if name == "loss" else name]
        return value
    if status.stop_reason is not StopReason.TARGET:
        return math.inf
    if name in {"samples_to_target", "steps_to_target"}:
        return float(summary["samples" if name == "samples_to_target" else "optimizer_steps"])
    # The recorded sum includes warm-up and slow steps, unlike a median.
    if not timed or summary["train_time_s"] is None:
        return None
    devices = 1 if name == "time_to_target_s" else spec.geometry.data_parallel_size / 3600
    return float(summary["train_time_s"]) * devices


def curve_of(folder: RunFolder) -> dict[int, float]:
    """Read the held-out losses of a run by samples, also while it trains."""
    with suppress(RecordError, OSError):
        evals = read_table(folder, "evals").dropna(subset=["samples", "eval_loss"])
        return dict(zip(evals["samples"].astype(int), evals["eval_loss"].tolist(), strict=True))
    return {}
