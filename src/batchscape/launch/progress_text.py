"""Runs in words, for the lines of a launcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchscape.record.checked import row_of
from batchscape.record.progress import duration_text, remaining_s
from batchscape.record.status import RunStatus, Status, StopReason
from batchscape.record.timing import why_untimed

if TYPE_CHECKING:
    from batchscape.launch.active import ActiveRun

__all__ = [
    "ended_text",
    "last_row",
    "running_text",
    "runs_text",
    "untimed_because",
]

_TAIL_BYTES = 2048
_SHOWN = {"optimizer_step", "samples", "train_time_s", "loss"}


def last_row(path: Path, tail_bytes: int = _TAIL_BYTES) -> dict[str, Any] | None:
    """Return the last whole row of a table of optimizer steps, reading no more than its end.

    Parameters
    ----------
    path : Path
    tail_bytes : int
        Bytes to read; a longer row is not found.

    Returns
    -------
    dict or None
        None where there is no whole row.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, end - tail_bytes))
            content = file.read()
    except FileNotFoundError:
        return None
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    if not lines or (len(lines) == 1 and start > 0):
        return None
    try:
        row = row_of(lines[-1])
    except ValueError:
        return None
    return row if row.keys() >= _SHOWN else None


def running_text(run: ActiveRun, row: dict[str, Any] | None) -> str:
    """Say how far a run is, by its last row."""
    steps = run.spec.optimizer_steps
    if row is None:
        return f"  {run.spec.run_id}  starting"
    done = row["optimizer_step"]
    line = f"  {run.spec.run_id}  optimizer step {done}/{steps}"
    # A program that is not ours may log neither.
    if row["loss"] is not None:
        line += f"  loss {row['loss']:.4f}"
    left_s = remaining_s(row, steps)
    if left_s is not None:
        line += f"  {duration_text(left_s)} left"
    return line


def ended_text(status: RunStatus, *, timed: bool) -> str:
    """Say how a run ended: its figures, or its reason; speed only where its times count."""
    if status.status is not Status.COMPLETED:
        return status.reason or "for an unknown reason"
    figures = status.summary
    parts = []
    if figures.get("final_loss") is not None:
        parts.append(f"loss {figures['final_loss']:.4f}")
    if figures.get("final_eval_loss") is not None:
        parts.append(f"held-out loss {figures['final_eval_loss']:.4f}")
    if timed and figures.get("tokens_per_s") is not None:
        parts.append(f"{figures['tokens_per_s']:,.0f} tokens/s")
    if not timed and figures.get("processor_time_s") is not None:
        spent_ms = 1000 * figures["processor_time_s"]
        parts.append(f"disturbed: {spent_ms:.3g} ms of processor time a step")
    if status.stop_reason is StopReason.TARGET:
        parts.append(f"target reached at optimizer step {figures['optimizer_steps']}")
    if status.reason is not None:
        parts.append(status.reason)
    return ", ".join(parts) or "no steps"


def untimed_because(launch: dict[str, Any], status: RunStatus) -> str | None:
    """Say why the times of a completed run do not count; None where they do."""
    return why_untimed(launch, status.summary) if status.status is Status.COMPLETED else None


def runs_text(count: int) -> str:
    """Count runs."""
    return f"{count} run" if count == 1 else f"{count} runs"
