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
    """What was passed over, and why; empty where nothing was."""
    passed_over: tuple[Path, ...] = ()
    """Checkpoints that nothing can go on from."""


def find_resumable(folder: RunFolder, run_id: str) -> Resumable:
    """Find the newest checkpoint that a run can go on from.

    A damaged one is passed over, and so is one whose rows are not all there: the table of the run
    would have a gap. An older one loses time, not results; where none is left, the run begins anew.
    Every rank finds the same.
    """
    notes: list[str] = []
    passed_over: list[Path] = []
    for path in checkpoints(folder.checkpoints):
        try:
            state = load_checkpoint(path)
            if state["run_id"] == run_id:
                done, rows = int(state["optimizer_step"]), folder.lines("steps")
                steps = [row["optimizer_step"] for row in read_json_lines(rows)]
                steps_before = [step for step in steps if step <= done]
                if steps_before != list(range(1, done + 1)):
                    msg = f"{rows} has {len(steps_before)} of the {done} rows before it"
                    raise DamagedCheckpointError(msg)
        except DamagedCheckpointError as error:
            notes.append(f"checkpoint {path.name} was passed over: {error}")
            passed_over.append(path)
            continue
        if notes:
            notes.append(f"going on from {path.name} instead")
        return Resumable(state, tuple(notes), tuple(passed_over))
    if notes:
        notes.append("no checkpoint is left, so that the run begins with its first step")
    return Resumable(None, tuple(notes), tuple(passed_over))


def agree_on(done: int, world_size: int, device: torch.device) -> None:
    """Check that all ranks go on after the same optimizer step."""
    if world_size == 1:
        return
    ends = torch.tensor([done, -done], dtype=torch.int64, device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    most, least = ends[0].item(), -ends[1].item()
    if most != least:
        msg = f"ranks would go on after different optimizer steps, {least} to {most}"
        raise CheckpointError(msg)
