"""PyTorch FSDP2 (`fully_shard`): parameters, gradients and optimizer state in shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from batchscape.config import Fsdp, Optimizer
from batchscape.engines.base import Reported
from batchscape.engines.distributed import (
    as_part_of,
    follow_first_rank,
    gather_whole,
    local_part,
    padded_bytes,
    part_for,
)
from batchscape.engines.plain import PlainEngine
from batchscape.engines.precision import autocast, casts_dropped
from batchscape.errors import BatchscapeError, ConfigError
from batchscape.geometry import BatchGeometry
from batchscape.models.checkpointing import blocks_of
from batchscape.record.heartbeat import Phase, beat

_reduce_scatter = (
    dist.reduce_scatter_single
    if hasattr(dist, "reduce_scatter_single")
    else dist.reduce_scatter_tensor
)
"""PyTorch 2.13 gave it a new name and deprecates the old one."""


def fsdp_engine(
    module: nn.Module,
    config: Fsdp,
    optimizer: Optimizer,
    precision: str,
    geometry: BatchGeometry,
    *,
    device: torch.device,
) -> PlainEngine:
    """Return an engine that shards, or a plain one for a single rank.

    Parameters are those of `FsdpEngine`.
    """
    if geometry.data_parallel_size > 1:
        return FsdpEngine(module, config, optimizer, precision, geometry, device=device)
    if config.compile:
        module.compile(dynamic=False)
    return PlainEngine(module, optimizer, precision)


class FsdpEngine(PlainEngine):
    """Every rank keeps a part of each parameter; blocks are gathered where they are used.

    A block is a child of an outermost `nn.ModuleList`; the rest of the model is gathered as one.
    No device ever holds more than one of these whole: the first rank draws the model on its CPU,
    and each block is given to all ranks and cut before the next one is. Parameters are cut along
    their first dimension, padded where ranks do not divide it, and the padding is exchanged like
    gradients are. The exchange sums: it does not average over ranks.

    Gradients are reduced in the last micro-step, and until then every rank accumulates whole ones.
    A parameter without a gradient takes part in the exchange with zeros (from PyTorch 2.13 on;
    before, the run ends). Blocks are gathered by all ranks together, so that every rank must enter
    every block in every forward.

    The optimizer works on the local parts as plain tensors: its kernels treat every element by
    itself, and not all of them know distributed tensors.

    The marks record the exchange of the last micro-step alone. On the CPU it does not overlap:
    what precedes the last part of it counts as backward.
    """

    gradients_are_whole = False
    micro_gradients_are_whole = False
    state_is_whole = False

    def __init__(
        self,
        module: nn.Module,
        config: Fsdp,
        optimizer: Optimizer,
        precision: str,
        geometry: BatchGeometry,
        *,
        device: torch.device,
    ) -> None:
        uncuttable_names = [
            n for n, p in module.named_parameters() if p.ndim == 0 or not p.is_contiguous()
        ]
        if uncuttable_names:
            raise ConfigError(
                "engine=fsdp cuts parameters along their first dimension: all must have one and be "
                f"contiguous, but not {', '.join(uncuttable_names[:5])} of this model; use "
                "engine=ddp, or give scalars the shape (1,)"
            )
        self.gradient_bytes = sum(
            padded_bytes(p, geometry.data_parallel_size)
            for p in module.parameters()
            if p.requires_grad
        )
        self._is_last = False
        self._last_micro_step_bytes = 0
        self._is_first = True
        """Whether the next micro-step is the first of an optimizer step."""
        _shard(module, config, device, self._count)
        self._trained = [
            p for p in module.parameters() if isinstance(p, DTensor) and p.requires_grad
        ]
        self._parts = nn.ParameterList(nn.Parameter(local_part(p.detach())) for p in self._trained)
        super().__init__(module, optimizer, precision, updated=self._parts)
        parameters = {id(part): p for part, p in zip(self._parts, self._trained, strict=True)}
        groups = self._optimizer.param_groups
        self._updated = [parameters[id(part)] for group in groups for part in group["params"]]
        """Parameters in the order in which the optimizer's state counts them."""

    def micro_step(self, inputs: Tensor, labels: Tensor, weight: float, *, last: bool) -> Tensor:
        """Do one forward and backward; exchange where it is time to."""
        if self._is_first:
            follow_first_rank(self.module)
        self._is_first = last
        _root(self.module).set_requires_gradient_sync(last)
        self._is_last, self._last_micro_step_bytes = last, 0
        with autocast(self._device_type, self._precision), casts_dropped():
            loss: Tensor = self.module(inputs, labels)[0]
        beat(Phase.BACKWARD)
        (loss * weight).backward()
        if last:
            if self._last_micro_step_bytes != self.gradient_bytes:
                raise BatchscapeError(
                    "engine=fsdp exchanges the gradients of all blocks in the last micro-step, "
                    f"{self.gradient_bytes} bytes of this model, and exchanged "
                    f"{self._last_micro_step_bytes}: every block must be used in every forward, on "
                    "every rank; use engine=ddp for models that leave blocks out"
                )
            self.marks.exchange_ends()
        return loss.detach()

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and the right predictions; on all ranks together."""
        with torch.compiler.set_stance("force_eager"), casts_dropped():
            loss, right = self.module(inputs, labels)
        # Gathered parameters would not follow a change of the parts.
        for inner in _sharded(self.module):
            inner.reshard()
        return loss, right

    def forget_gradients(self) -> None:
        """Drop the gradients that were exchanged since the last optimizer step."""
        super().forget_gradients()
        self._parts.zero_grad(set_to_none=True)

    def reported(self) -> Reported:
        """Return the ranks of the mesh that the parameters are cut over."""
        (ranks,) = {p.device_mesh.size() for p in self._trained}
        return Reported(data_parallel_size=ranks)

    def state(self) -> dict[str, Any]:
        """Return the whole model and optimizer, gathered on the CPU; on all ranks together."""
        optimizer = self._optimizer.state_dict()
        return {
            "model": {
                name: gather_whole(value) for name, value in self.module.state_dict().items()
            },
            "optimizer": {
                **optimizer,
                "state": {
                    index: {
                        name: gather_whole(as_part_of(self._updated[index], value))
                        for name, value in entry.items()
                    }
                    for index, entry in optimizer["state"].items()
                },
            },
            "scaler": self._scaler.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore this rank's part of what `state` returned."""
        local_state = self.module.state_dict()
        self.module.load_state_dict(
            {name: part_for(local_state[name], value) for name, value in state["model"].items()}
        )
        optimizer = state["optimizer"]
        parts = {
            index: {
                name: local_part(part_for(self._updated[index], value))
                for name, value in entry.items()
            }
            for index, entry in optimizer["state"].items()
        }
        self._optimizer.load_state_dict({**optimizer, "state": parts})

    def close(self) -> None:
        """Drop the sharded model."""
        self._trained, self._updated, self._parts = [], [], nn.ParameterList()
        super().close()

    def _update(self) -> None:
        """Update this rank's part of the parameters."""
        for part, parameter in zip(self._parts, self._trained, strict=True):
            part.grad = None if parameter.grad is None else local_part(parameter.grad)
        super()._update()

    def _count(self, exchanged: int) -> None:
        """Count bytes that the exchange is given now, and set the marks of the last micro-step."""
        self.exchanged_bytes += exchanged
        if not self._is_last:
            return
        if self._last_micro_step_bytes == 0:
            self.marks.exchange_begins()
        self._last_micro_step_bytes += exchanged
        if self._last_micro_step_bytes == self.gradient_bytes:
            self.marks.gradients_ready()


class _SummedExchange:
    """The reduce-scatter of FSDP, counted; FSDP asks it for its buffers too."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ANN401  (ReduceOp or one of its members: torch has no common type)
        async_op: bool = False,
    ) -> dist.Work | None:
        self._count(input_tensor.nbytes)
        work: dist.Work | None = _reduce_scatter(
            output=output_tensor, input=input_tensor, op=op, group=group, async_op=async_op
        )
        return work


def _shard(
    module: nn.Module, config: Fsdp, device: torch.device, count: Callable[[int], None]
) -> None:
    """Shard blocks, then the rest; sum gradients and count what is exchanged."""
    mesh = DeviceMesh.from_group(cast("dist.ProcessGroup", dist.group.WORLD), device.type)
    blocks = list(dict.fromkeys(blocks_of(module)))
    if config.compile:
        # The forward alone: FSDP gathers parameters around it.
        for part in blocks or list(module.children()):
            part.forward = torch.compile(part.forward, dynamic=False)
    for block in blocks:
        _take_from_first_rank(block, device)
        fully_shard(block, mesh=mesh, reshard_after_forward=config.reshard_after_forward)
    _take_from_first_rank(module, device)
    fully_shard(module, mesh=mesh)
    exchange: Any = _SummedExchange(count)
    for inner in _sharded(module):
        inner.set_gradient_divide_factor(1.0)
        inner.set_force_sum_reduction_for_comms(enable=True)
        inner.set_custom_reduce_scatter(exchange)
    # Before PyTorch 2.13 a parameter without a gradient stays out, which ends the run: fewer bytes
    # are exchanged than declared.
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        _root(module).set_reduce_scatter_unused_params(True)


def _take_from_first_rank(module: nn.Module, device: torch.device) -> None:
    """Copy every tensor that FSDP has not cut to the device, with the values of rank 0."""
    replacements: dict[int, Tensor] = {}
    """New tensor by the id of the old one: modules that share one go on to share it."""
    for owner in module.modules():
        tensors = [
            *owner.named_parameters(recurse=False, remove_duplicate=False),
            *owner.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in tensors:
            if isinstance(tensor, DTensor):
                continue
            if id(tensor) not in replacements:
                replacements[id(tensor)] = _from_first_rank(tensor, device)
            setattr(owner, name, replacements[id(tensor)])


@torch.no_grad()
def _from_first_rank(tensor: Tensor, device: torch.device) -> Tensor:
    on_device = tensor
    if tensor.device != device:
        on_device = torch.empty_like(tensor, device=device)
        if not tensor.is_meta:
            on_device.copy_(tensor)
    target = on_device.detach()
    values = target.contiguous()
    dist.broadcast(values, src=0)
    if values is not target:
        target.copy_(values)
    if isinstance(tensor, nn.Parameter) and on_device is not tensor:
        return nn.Parameter(on_device, requires_grad=tensor.requires_grad)
    return on_device


def _sharded(module: nn.Module) -> list[FSDPModule]:
    return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]


def _root(module: nn.Module) -> FSDPModule:
    """Return the module, typed as the FSDP module that `fully_shard` has made of it."""
    return cast("FSDPModule", module)
