"""The random state of every rank, as a checkpoint holds it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from batchscape.device import is_accelerator, module_of

__all__ = ["gather_random_states", "random_state", "set_random_state"]


def random_state(device: torch.device) -> Tensor:
    """Return the state of this rank's generators, of the CPU and of a device: bytes."""
    state = torch.get_rng_state()
    if is_accelerator(device):
        return torch.cat([state, module_of(device).get_rng_state(device)])
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Take back what `random_state` gave."""
    size = len(torch.get_rng_state())
    torch.set_rng_state(state[:size].clone())
    if is_accelerator(device):
        module_of(device).set_rng_state(state[size:].clone(), device)


def gather_random_states(device: torch.device, world_size: int) -> Tensor:
    """Return the state of every rank, shape (world_size, bytes), on each of them."""
    state = random_state(device)
    if world_size == 1:
        return state[None]
    # Gloo, which ranks that share a device exchange through, gathers on the CPU only.
    mine = state.to(device) if dist.get_backend() == "nccl" else state
    states = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(states, mine)
    return torch.stack(states).cpu()
