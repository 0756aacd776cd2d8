"""Whole tensors and the parts of them that ranks hold."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
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
    """Declare a tensor that was made for this rank's part of another to be cut like it."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    return DTensor.from_local(
        value, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def part_for(mine: Tensor, value: Any) -> Any:  # noqa: ANN401  (as above)
    """Return the part of a whole tensor, cut as `mine` is."""
    if not isinstance(mine, DTensor) or not isinstance(value, Tensor) or value.ndim == 0:
        return value
    return distribute_tensor(
        value.to(mine.device), mine.device_mesh, mine.placements, src_data_rank=None
    )
