"""State of a run on disk: written at once, verified when read, loaded without code.

A checkpoint is named `step-<optimizer steps done>-<first digits of its SHA-256>.pt`: one rename
makes it appear whole, and its name tells whether its content is what was written.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from batchscape.device import is_accelerator, module_of
from batchscape.errors import CheckpointError, DamagedCheckpointError
from batchscape.record.disk import as_disk_error
from batchscape.record.files import read_json_lines, sha256_of
from batchscape.record.folder import CHECKPOINT, CHECKPOINTS_KEPT, RunFolder


def random_state(device: torch.device) -> Tensor:
    """Return the state of this rank's generators, of the CPU and of a device: bytes."""
    state = torch.get_rng_state()
    if is_accelerator(device):
        return torch.cat([state, module_of(device).get_rng_state(device)])
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore what `random_state` returned."""
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size].clone())
    if is_accelerator(device):
        module_of(device).set_rng_state(state[size:].clone(), device)


def gather_random_states(device: torch.device, world_size: int) -> Tensor:
    """Return the state of every rank, shape (world_size, bytes), on each of them."""
    state = random_state(device)
    if world_size == 1:
        return state[None]
    # Gloo gathers on the CPU only; ranks that share a device use it.
    state = state.to(device) if dist.get_backend() == "nccl" else state
    states = [torch.empty_like(state) for _ in range(world_size)]
    dist.all_gather(states, state)
    return torch.stack(states).cpu()


def save_checkpoint(folder: Path, optimizer_step: int, state: Mapping[str, Any]) -> Path:
    """Write a checkpoint, and remove all but the newest `CHECKPOINTS_KEPT`."""
    temporary = folder / f".step-{optimizer_step}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Processes that were killed while they wrote may have left some.
        for unfinished in folder.glob(".step-*.tmp"):
            unfinished.unlink(missing_ok=True)
        with temporary.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"step-{optimizer_step:09d}-{sha256_of(temporary)[:16]}.pt"
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        raise as_disk_error(error, folder) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    for old in checkpoints(folder)[CHECKPOINTS_KEPT:]:
        old.unlink(missing_ok=True)
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Verify and load one checkpoint."""
    match = CHECKPOINT.fullmatch(path.name)
    if match is None or sha256_of(path)[:16] != match[2]:
        raise DamagedCheckpointError(
            f"{path} is damaged: its content does not match the digest in its name"
        )
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001  (pickle, zip and the allocator raise many kinds)
        problem = str(error)
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in problem:
            # Torch's own message advises to load the file in a way that runs its code.
            class_match = re.search(r"GLOBAL (\S+)", problem)
            problem = "it holds more than weights and plain data"
            if class_match:
                problem += f" ({class_match[1]})"
        raise CheckpointError(f"{path} cannot be loaded: {problem}") from None
    return state


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the newest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name)]
    return sorted(paths, key=lambda path: path.name, reverse=True)


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
            f"{rows} must have optimizer steps 1 to {steps_done}, once each, for checkpoint "
            f"{path.name}; it has {len(steps_before)} rows up to there"
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
