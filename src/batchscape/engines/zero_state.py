"""State that ZeRO spreads over ranks, brought together for a checkpoint and dealt out again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def gather_state(library: Any, engine: Any, module: nn.Module, stage: int) -> dict[str, Any]:  # noqa: ANN401  (untyped library)
    """Return the state of model and optimizer; collective, whole on rank 0."""
    with _whole_parameters(library, module, stage, write=False):
        model = {name: _copy(tensor) for name, tensor in module.state_dict().items()}
    if stage == 0:
        return {"model": model, "optimizer": engine.optimizer.state_dict()}
    base = engine.optimizer.optimizer
    mine = [
        {name: _copy(value) for name, value in base.state[part].items()}
        for part in _parts(engine, stage)
    ]
    rank, size = dist.get_rank(), dist.get_world_size()
    shards: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(mine, shards)
    return {"model": model, "optimizer": shards}


def restore_state(
    library: Any,  # noqa: ANN401  (untyped library)
    engine: Any,  # noqa: ANN401  (untyped library)
    module: nn.Module,
    stage: int,
    state: dict[str, Any],
) -> None:
    """Take back what `gather_state` gave, on as many ranks; collective."""
    with _whole_parameters(library, module, stage, write=True):
        module.load_state_dict(state["model"])
    if stage == 0:
        engine.optimizer.load_state_dict(state["optimizer"])
        return
    zero = engine.optimizer
    # What the optimizer updates is a copy of the model's parameters.
    zero.refresh_fp32_params()
    base = zero.optimizer
    mine = state["optimizer"][dist.get_rank()]
    for part, values in zip(_parts(engine, stage), mine, strict=True):
        base.state[part] = {
            name: value.to(part.device) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }


def _whole_parameters(library: Any, module: nn.Module, stage: int, *, write: bool) -> Any:  # noqa: ANN401
    """Return a context in which every rank has all parameters; what rank 0 writes is kept."""
    return library.zero.GatheredParameters(
        list(module.parameters()), modifier_rank=0 if write else None, enabled=stage == 3
    )


def _parts(engine: Any, stage: int) -> list[Tensor]:  # noqa: ANN401  (untyped library)
    """Return the flat parts that this rank's optimizer updates, in order."""
    zero = engine.optimizer
    parts: list[Tensor] = (
        zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
    )
    return parts


def _copy(value: Any) -> Any:  # noqa: ANN401  (tensors and numbers)
    """Return a tensor apart from the buffer that it lies in, on the host."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return value
