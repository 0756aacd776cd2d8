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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from batchscape.device import is_accelerator, module_of
from batchscape.errors import CheckpointError, DamagedCheckpointError
from batchscape.record.disk import as_disk_error
from batchscape.record.files import sha256_of
from batchscape.record.folder import CHECKPOINT, CHECKPOINTS_KEPT


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
            class_name = re.search(r"GLOBAL (\S+)", problem)
            problem = "it holds more than weights and plain data"
            if class_name:
                problem += f" ({class_name[1]})"
        raise CheckpointError(f"{path} cannot be loaded: {problem}") from None
    return state


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the newest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name)]
    return sorted(paths, key=lambda path: path.name, reverse=True)
