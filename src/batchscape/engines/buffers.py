"""Buffers that every rank changes by itself, such as the running means of a normalisation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def follow_first_rank(module: nn.Module) -> None:
    """Give every rank the buffers of the first one; on all ranks together.

    DDP does so by itself before the first micro-step of an optimizer step. Where nobody did, ranks
    would drift apart and each evaluate another model; and a checkpoint, which holds the buffers of
    the first rank, would change the others.

    What a module declares to be no part of its state, as tables of rotations and masks
    (`persistent=False`), is made alike on every rank and stays so: it is left where it is.
    """
    # Not by their names, which a module of the user's may change in its state.
    kept = {id(value) for value in module.state_dict(keep_vars=True).values()}
    for buffer in module.buffers():
        if id(buffer) not in kept:
            continue
        values = buffer.contiguous()
        dist.broadcast(values, src=0)
        if values is not buffer:
            buffer.copy_(values)
