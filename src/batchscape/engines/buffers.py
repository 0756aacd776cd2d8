"""Buffers that every rank changes by itself, such as the running means of a normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["follow_first_rank"]


@torch.no_grad()
def follow_first_rank(module: nn.Module) -> None:
    """Give every rank the buffers of the first one; on all ranks together.

    DDP does so by itself before the first micro-step of an optimizer step. Where nobody did, ranks
    would drift apart and each evaluate another model; and a checkpoint, which holds the buffers of
    the first rank, would change the others.

    What a module declares to be no part of its state, as tables of rotations and masks
    (`persistent=False`), is made alike on every rank and stays so: it is left where it is.

    Parameters
    ----------
    module : nn.Module
    """
    for buffer in _state(module):
        given = buffer.contiguous()
        dist.broadcast(given, src=0)
        if given is not buffer:
            buffer.copy_(given)


def _state(module: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers that a checkpoint holds, each once."""
    seen: set[int] = set()
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            is_state = buffer is not None and name not in owner._non_persistent_buffers_set
            if buffer is not None and is_state and id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer
