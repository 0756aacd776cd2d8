"""PyTorch DistributedDataParallel, and a single rank without it."""

# Annotations stay objects here: DDP checks those of its hook by identity.

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from batchscape.config import AdamW, Ddp, Sgd
from batchscape.engines.optimizers import build_optimizer, clip_gradients

__all__ = ["DdpEngine"]


class DdpEngine:
    """One gradient exchange an optimizer step, overlapped with the last backward.

    The exchange sums gradients (its hook replaces DDP's own average): the loss is already
    divided by the global number of targets, so a sum over micro-steps and ranks is the gradient
    of the whole batch.

    Parameters
    ----------
    module : nn.Module
        Returns the sum of losses; already on the device.
    config : Ddp
    optimizer : AdamW or Sgd
    precision : str
        `float32`, `bfloat16` or `float64`.
    world_size : int
        Data-parallel ranks; a process group exists where it is above 1.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Ddp,
        optimizer: AdamW | Sgd,
        precision: str,
        world_size: int,
    ) -> None:
        self.module = module
        self.exchanged_bytes = 0
        self.on_gradients: Callable[[], None] = _nothing
        self._clip_norm = optimizer.gradient_clip_norm
        self._device_type = next(module.parameters()).device.type
        self._autocast = precision == "bfloat16"
        self._checked = False
        if config.compile:
            module.compile()
        self._wrapped: DistributedDataParallel | None = None
        if world_size > 1:
            self._wrapped = DistributedDataParallel(
                module,
                bucket_cap_mb=config.bucket_cap_mb,
                gradient_as_bucket_view=True,
            )
            self._wrapped.register_comm_hook(self, _sum_over_ranks)
        self._optimizer = build_optimizer(optimizer, module)

    def micro_step(self, inputs: Tensor, targets: Tensor, weight: float, *, last: bool) -> Tensor:
        """Do one forward and backward; exchange in the last one only."""
        wrapped = self._wrapped
        with nullcontext() if wrapped is None or last else wrapped.no_sync():
            with torch.autocast(self._device_type, torch.bfloat16, enabled=self._autocast):
                loss: Tensor = (wrapped or self.module)(inputs, targets)[0]
            (loss * weight).backward()
        if last and wrapped is None:
            self.on_gradients()
        return loss.detach()

    def optimizer_step(self, learning_rate: float) -> Tensor:
        """Clip the whole gradient, update the parameters, clear the gradients."""
        if not self._checked:
            _check_strides(self.module)
            self._checked = True
        norm = clip_gradients(self.module, self._clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the model and the optimizer."""
        return {"model": self.module.state_dict(), "optimizer": self._optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Drop the wrapped model, so that the process group can be ended."""
        # The reducer of a live DDP module joins a gloo thread and may wait for it for ever.
        self._wrapped = None
        self.module = nn.Identity()
        self.on_gradients = _nothing


def _sum_over_ranks(engine: DdpEngine, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum one bucket over the ranks, count its bytes, and mark the last one."""
    gradients = bucket.buffer()
    engine.exchanged_bytes += gradients.nbytes
    if bucket.is_last():
        engine.on_gradients()
    work = dist.all_reduce(gradients, async_op=True)
    done: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda future: future.value()[0]
    )
    return done


def _check_strides(module: nn.Module) -> None:
    """Refuse gradients laid out unlike their parameter: fused kernels then update wrongly."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
            msg = (
                f"the gradient of {name} has strides {parameter.grad.stride()}, its parameter "
                f"{parameter.stride()}; fused optimizers need them equal"
            )
            raise RuntimeError(msg)


def _nothing() -> None:
    """Stand in where nobody listens."""
