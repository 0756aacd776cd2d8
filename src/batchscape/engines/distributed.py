"""Tensors over the ranks: parts of a whole, and buffers of which every rank has a copy."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def padded_bytes(tensor: Tensor, ranks: int) -> int:
    """Return the bytes of a tensor whose first dimension is rounded up to equal parts."""
    rows, *rest = tensor.shape
    return math.ceil(rows / ranks) * ranks * math.prod(rest) * tensor.element_size()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part, which shares its memory; a tensor that is not cut is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that ranks have parts of; on all ranks together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_whole(value: Any) -> Any:  # noqa: ANN401  (states hold tensors, numbers and None)
    """Return a value of a state, whole and on the CPU; on all ranks together."""
    return full_tensor(value).cpu() if isinstance(value, Tensor) else value


def as_part_of(like: DTensor, value: Any) -> Any:  # noqa: ANN401  (as above)
    """Return a tensor made for this rank's part of `like` as a part of a whole, cut like it."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    return DTensor.from_local(
        value, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def part_for(like: Tensor, value: Any) -> Any:  # noqa: ANN401  (as above)
    """Return the part of a whole tensor, cut as `like` is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.ndim == 0:
        return value
    return distribute_tensor(
        value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


@torch.no_grad()
def follow_first_rank(module: nn.Module) -> None:
    """Give every rank the buffers of the first one; on all ranks together.

    DDP does so before the first micro-step of an optimizer step. Otherwise each rank would evaluate
    another model, and a checkpoint, which holds the buffers of the first rank, would change the
    others.

    Buffers that are no part of a module's state (`persistent=False`, as masks and tables of
    rotations) are equal on all ranks from the beginning and are left alone.
    """
    # By identity, as a module of the user's may give its state other names.
    state_ids = {id(value) for value in module.state_dict(keep_vars=True).values()}
    for buffer in module.buffers():
        if id(buffer) not in state_ids:
            continue
        values = buffer.contiguous()
        dist.broadcast(values, src=0)
        if values is not buffer:
            buffer.copy_(values)
