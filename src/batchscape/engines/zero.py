"""What ZeRO exchanges, and the state that it spreads over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from batchscape.errors import BatchscapeError
from batchscape.text import list_text


def bytes_of_exchange(module: nn.Module, stage: int, ranks: int) -> int:
    """Return the bytes of gradients that one exchange is given by each rank."""
    trained = [p for p in module.parameters() if p.requires_grad]
    # Stage 3 pads each parameter to a multiple of the ranks.
    multiple = ranks if stage == 3 else 1
    return sum(math.ceil(p.numel() / multiple) * multiple * p.element_size() for p in trained)


def observed(
    collective: Callable[..., Any], observe: Callable[[Tensor], None]
) -> Callable[..., Any]:
    """Return a collective that gives its tensor to `observe` before it starts."""

    def observed_collective(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401  (passed on as they are)
        observe(keywords.get("input_tensor", keywords.get("tensor", (*arguments, None)[0])))
        return collective(*arguments, **keywords)

    return observed_collective


class Arrivals:
    """Checks that every trained parameter has had a gradient in a micro-step."""

    def __init__(self, module: nn.Module, stage: int) -> None:
        self._stage = stage
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._arrived: set[str] = set()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: self._arrived.add(name)
                )

    def check(self) -> None:
        """Raise where a parameter has had no gradient; then begin the next micro-step."""
        names = [name for name in self._names if name not in self._arrived]
        self._arrived.clear()
        if names:
            raise BatchscapeError(
                f"with zero_stage={self._stage} every trained parameter must have a part in the "
                "loss of every micro-step on every rank; on this rank these have none: "
                f"{list_text(names, 'and', 5)}. Add zero times their sum to the model's loss, "
                "or use engine.zero_stage=0 or 1"
            )


def gather_state(library: Any, engine: Any, module: nn.Module, stage: int) -> dict[str, Any]:  # noqa: ANN401  (untyped library)
    """Return the state of model and optimizer; collective, whole on rank 0."""
    with _whole_parameters(library, module, stage, write=False):
        model = {name: _copy(tensor) for name, tensor in module.state_dict().items()}
    if stage == 0:
        return {"model": model, "optimizer": engine.optimizer.state_dict()}
    torch_optimizer = engine.optimizer.optimizer
    part_states = [
        {name: _copy(value) for name, value in torch_optimizer.state[part].items()}
        for part in _parts(engine, stage)
    ]
    rank, size = dist.get_rank(), dist.get_world_size()
    shards: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(part_states, shards)
    return {"model": model, "optimizer": shards}


def restore_state(
    library: Any,  # noqa: ANN401  (untyped library)
    engine: Any,  # noqa: ANN401  (untyped library)
    module: nn.Module,
    stage: int,
    state: dict[str, Any],
) -> None:
    """Restore what `gather_state` returned, on as many ranks; collective."""
    with _whole_parameters(library, module, stage, write=True):
        module.load_state_dict(state["model"])
    if stage == 0:
        engine.optimizer.load_state_dict(state["optimizer"])
        return
    zero = engine.optimizer
    # What the optimizer updates is a copy of the model's parameters.
    zero.refresh_fp32_params()
    torch_optimizer = zero.optimizer
    part_states = state["optimizer"][dist.get_rank()]
    for part, values in zip(_parts(engine, stage), part_states, strict=True):
        torch_optimizer.state[part] = {
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
    """Copy a tensor to the host, out of the buffer that it lies in."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return value
