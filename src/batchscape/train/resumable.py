"""What a run can go on from: a checkpoint that is whole, with all rows of the steps before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from batchscape.errors import CheckpointError, DamagedCheckpointError
from batchscape.record.files import read_json_lines
from batchscape.record.folder import RunFolder
from batchscape.train.checkpoint import checkpoints, load_checkpoint


class Resumable(NamedTuple):
    """Where a run goes on."""

    state: dict[str, Any] | None
    """Of the checkpoint; None: the run begins with its first step."""
    notes: tuple[str, ...]
    """Which checkpoints were passed over, and why."""
    damaged_checkpoints: tuple[Path, ...] = ()
    """Checkpoints that nothing can go on from."""


def load_whole(path: Path, rows: Path, run_id: str | None = None) -> dict[str, Any]:
    """Load a checkpoint.

    Parameters
    ----------
    path : Path
    rows : Path
        Rows of the steps before it.
    run_id : str, optional
        The run that goes on from it; None: any.

    Raises
    ------
    CheckpointError
        If it is of another run, or cannot be loaded here.
    DamagedCheckpointError
        If it is damaged, or some rows are missing.
    """
    state = load_checkpoint(path)
    if run_id not in {None, state["run_id"]}:
        raise CheckpointError(
            f"{path.parent} holds checkpoints of run {state['run_id']}, and this is run {run_id}; "
            "remove the folder"
        )
    steps_done = int(state["optimizer_step"])
    steps = [row["optimizer_step"] for row in read_json_lines(rows)]
    steps_before = [step for step in steps if step <= steps_done]
    if steps_before != list(range(1, steps_done + 1)):
        raise DamagedCheckpointError(
            f"{rows} has {len(steps_before)} of the {steps_done} rows before it"
        )
    return state


def find_resumable(folder: RunFolder, run_id: str) -> Resumable:
    """Find the newest checkpoint that a run can go on from.

    A damaged one is passed over, and so is one whose rows are not all there: the table of the run
    would have a gap. An older one loses time, not results; where none is left, the run begins anew.
    Every rank finds the same.
    """
    notes: list[str] = []
    damaged_checkpoints: list[Path] = []
    state = None
    for path in checkpoints(folder.checkpoints):
        try:
            state = load_whole(path, folder.lines("steps"), run_id)
        except DamagedCheckpointError as error:
            notes.append(f"checkpoint {path.name} was passed over: {error}")
            damaged_checkpoints.append(path)
            continue
        if notes:
            notes.append(f"going on from {path.name} instead")
        break
    else:
        if notes:
            notes.append("no checkpoint is left, so that the run begins with its first step")
    return Resumable(state, tuple(notes), tuple(damaged_checkpoints))


def agree_on(steps_done: int, world_size: int, device: torch.device) -> None:
    """Check that all ranks go on after the same optimizer step."""
    if world_size == 1:
        return
    # The largest of -n is minus the smallest n: one exchange gives both.
    extremes = torch.tensor([steps_done, -steps_done], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    most, least = extremes[0].item(), -extremes[1].item()
    if most != least:
        raise CheckpointError(
            f"ranks would go on after different optimizer steps, {least} to {most}"
        )
