"""The progress of the runs of a sweep, read without loading their tables."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchscape.errors import RecordError
from batchscape.record.disk import read_each
from batchscape.record.files import last_row, read_json
from batchscape.record.folder import RunFolder, SweepFolder, no_runs
from batchscape.record.instants import file_age_s
from batchscape.record.state import UNREADABLE, Next, RunState, read_state
from batchscape.record.status import Status
from batchscape.record.timing import why_untimed


@dataclass(frozen=True)
class RunProgress:
    """Progress of one run."""

    run_id: str
    status: str
    """A `Status`, or `unreadable`."""
    optimizer_step: int | None = None
    """Optimizer steps done."""
    optimizer_steps: int | None = None
    """Optimizer steps in all; None for a rejected cell."""
    loss: float | None = None
    """Latest training loss; of a sealed run, the loss over its last tenth."""
    age_s: float | None = None
    """Time since the last row of an open run."""
    reason: str | None = None
    cause: str | None = None
    """`Cause` of its end, where it did not complete."""
    stop_reason: str | None = None
    """Why a completed run stopped."""
    rank: int | None = None
    """The rank that raised the cause first."""
    phase: str | None = None
    """What that rank was doing."""
    attempts: int = 0
    """Starts of its processes so far."""
    checkpoint_step: int | None = None
    """Optimizer steps in the newest checkpoint of an open run; None without one."""
    left_s: float | None = None
    """Remaining time of a running run, see `remaining_s`."""
    launcher: str | None = None
    """Process id and machine of the launcher of a running run."""
    untimed: str | None = None
    """Why the times of a completed run do not count."""
    command: str | None = None
    """Command that launched a completed run."""
    next: Next = Next.BEGIN
    """Next step of the same command."""


def sweep_progress(sweep: SweepFolder) -> list[RunProgress]:
    """Return the progress of every run of a sweep, by name.

    A run that claims to be running while no launcher is at work is shown as interrupted.

    Raises
    ------
    RecordError
        If the folder holds no runs.
    """
    folders = sweep.run_folders()
    if not folders:
        msg = no_runs(sweep.path)
        raise RecordError(msg)
    return read_each(run_progress, folders, sweep.path)


def run_progress(folder: RunFolder) -> RunProgress:
    """Read the progress of a run; read again where its launcher may have written meanwhile."""
    with contextlib.suppress(RecordError, OSError):
        return _progress(read_state(folder))
    try:
        return _progress(read_state(folder))
    except (RecordError, OSError) as error:
        return RunProgress(folder.path.name, UNREADABLE, reason=str(error), next=Next.LEAVE)


def _progress(state: RunState) -> RunProgress:
    folder, record = state.folder, state.record
    is_running, is_completed = state.status == Status.RUNNING, state.status == Status.COMPLETED
    row = {} if record.seal else last_row(folder.lines("steps"))
    loss = record.summary.get("final_loss") if record.seal else row.get("loss")
    has_launch = record.status in {Status.COMPLETED, Status.RUNNING} and folder.launch.exists()
    launch = read_json(folder.launch) if has_launch else {}
    steps = (state.config.get("resolved") or {}).get("optimizer_steps")
    return RunProgress(
        run_id=folder.path.name,
        status=str(state.status),
        optimizer_step=(
            record.summary.get("optimizer_steps") if record.seal else row.get("optimizer_step")
        ),
        optimizer_steps=steps,
        loss=None if loss is None or math.isnan(loss) else loss,
        age_s=file_age_s(folder.lines("steps")) if row else None,
        reason=state.reason,
        cause=state.cause,
        stop_reason=record.stop_reason,
        rank=record.rank,
        phase=record.phase,
        attempts=len(record.attempts),
        checkpoint_step=None if record.seal else folder.checkpoint_step,
        left_s=remaining_s(row, steps) if is_running else None,
        launcher=state.holder if is_running else None,
        untimed=why_untimed(launch, record.summary) if is_completed else None,
        command=launch.get("command") if is_completed else None,
        next=state.next_step(),
    )


def remaining_s(row: Mapping[str, Any], optimizer_steps: int | None) -> float | None:
    """Return the remaining time of a run at the time of its latest step, without evaluations.

    Parameters
    ----------
    row : mapping
        Latest row of its optimizer steps; may be empty.
    optimizer_steps : int or None
        Optimizer steps in all.

    Returns
    -------
    float or None
        In seconds. None during warm-up, whose steps differ in time, or where no time is known.
    """
    done, spent_s = row.get("optimizer_step"), row.get("train_time_s")
    if not done or spent_s is None or optimizer_steps is None or row.get("warmup"):
        return None
    # The mean, where a program logs no step times, includes the slow first step.
    step_s = row.get("step_time_s") or spent_s / done
    return max(0.0, float(step_s) * (optimizer_steps - int(done)))
