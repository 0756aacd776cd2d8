"""PyTorch DistributedDataParallel, and a single rank without it."""

# Annotations stay objects here: DDP checks those of its hook by identity.

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from batchscape.config import Ddp, Optimizer
from batchscape.engines.optimizers import build_optimizer, clip_gradients, set_hyperparameters
from batchscape.engines.precision import autocast
from batchscape.engines.reach import unreached
from batchscape.errors import BatchscapeError
from batchscape.measure.clock import NoMarks, StepMarks
from batchscape.models.undisturbed import undisturbed

__all__ = ["DdpEngine"]

_PROBED_SAMPLES = 2
"""Of the first micro-batch, that tell whether a parameter may be left without a gradient. Few, as
more are more likely to meet every branch; two, as statistics over one sample are none."""


class DdpEngine:
    """One gradient exchange an optimizer step, overlapped with the last backward.

    The exchange sums gradients (its hook replaces DDP's own average): the loss is already
    divided by the global number of targets, so a sum over micro-steps and ranks is the gradient
    of the whole batch.

    In float16 the loss is scaled up before the backward, so that small gradients stay above the
    smallest float16, and gradients are scaled down before they are clipped. They are judged once
    they are summed, so that every rank finds the same overflow and skips the same update.

    A parameter that the loss of a whole batch does not use has a gradient of zero, on every number
    of ranks: its weights decay and its moments fade. DDP itself waits for every gradient, so where
    the first samples leave a parameter without one, zero times every parameter is added to the
    loss of the exchanging micro-step.

    Parameters
    ----------
    module : nn.Module
        Returns the sum of losses; already on the device.
    config : Ddp
    optimizer : Optimizer
    precision : str
        `float32`, `bfloat16`, `float16` or `float64`.
    world_size : int
        Data-parallel ranks; a process group exists where it is above 1.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Ddp,
        optimizer: Optimizer,
        precision: str,
        world_size: int,
    ) -> None:
        self.module = module
        self.exchanged_bytes = 0
        self.gradients_are_whole = True
        self.marks: StepMarks = NoMarks()
        self.skipped: Tensor | None = None
        device = next(module.parameters()).device
        self._device_type = device.type
        self._precision = precision
        self._checked = False
        self._adds_zeros: bool | None = None
        self.exchange_is_whole = False
        """Whether the last bucket of this optimizer step was given to the exchange."""
        self._scaler = GradScaler(device.type, enabled=precision == "float16")
        self._one = torch.ones((), device=device)
        if config.compile:
            # Micro-steps have few sizes (those of the stages, and parts of one where the noise is
            # sampled), each worth code of its own: one code for all would be slower in every step.
            module.compile(dynamic=False)
        self._wrapped: DistributedDataParallel | None = None
        if world_size > 1:
            self._wrapped = DistributedDataParallel(
                module,
                bucket_cap_mb=config.bucket_cap_mb,
                gradient_as_bucket_view=True,
            )
            self._wrapped.register_comm_hook(self, _sum_over_ranks)
        self._optimizer = build_optimizer(optimizer, module)

    @property
    def gradient_scale(self) -> Tensor | float:
        """Factor of the gradients between backward and optimizer step."""
        return self._scale() if self._scaler.is_enabled() else 1.0

    def micro_step(self, inputs: Tensor, targets: Tensor, weight: float, *, last: bool) -> Tensor:
        """Do one forward and backward; exchange in the last one only.

        Raises
        ------
        BatchscapeError
            If parameters are left without a gradient that the first samples brought one for, so
            that the exchange waits for them for ever.
        """
        wrapped = self._wrapped
        if wrapped is not None and self._adds_zeros is None:
            self._adds_zeros = self._may_leave_out(inputs, targets)
        self.exchange_is_whole = False
        with nullcontext() if wrapped is None or last else wrapped.no_sync():
            with autocast(self._device_type, self._precision):
                loss: Tensor = (wrapped or self.module)(inputs, targets)[0]
            scaled: Tensor = self._scaler.scale(loss * weight)
            if last and self._adds_zeros:
                scaled = _plus_zeros(scaled, self.module)
            scaled.backward()
        if last and wrapped is None:
            self.marks.gradients_ready()
        elif last:
            if not self.exchange_is_whole:
                raise _not_exchanged(unreached(self.module, loss))
            self.marks.exchange_ends()
        return loss.detach()

    def optimizer_step(self, settings: Optimizer, factor: float) -> Tensor:
        """Clip the whole gradient, update the parameters, clear the gradients."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self._checked:
            _check_strides(self.module)
            self._checked = True
        self._scaler.unscale_(self._optimizer)
        norm = clip_gradients(self.module, settings.gradient_clip_norm)
        set_hyperparameters(self._optimizer, settings, factor)
        self._scaler.step(self._optimizer)
        if self._scaler.is_enabled():
            # The scale falls when an update was skipped, and then only; seen without waiting.
            before = self._scale()
            self._scaler.update()
            self.skipped = self._scale() < before
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the model, the optimizer and the loss scale."""
        return {
            "model": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        """Drop the wrapped model, so that the process group can be ended."""
        # The reducer of a live DDP module joins a gloo thread and may wait for it for ever.
        self._wrapped = None
        self.module = nn.Identity()
        self.marks = NoMarks()

    def _may_leave_out(self, inputs: Tensor, targets: Tensor) -> bool:
        """Return whether a parameter has no part in the loss of the first samples of some rank."""
        few = slice(_PROBED_SAMPLES)
        with undisturbed(self.module), autocast(self._device_type, self._precision):
            # A compiled module is called as it was written: this shape is not the training's.
            loss = self.module.forward(inputs[few], targets[few])[0]
        found = self._one * float(bool(unreached(self.module, loss)))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def _scale(self) -> Tensor:
        """Return the scale of the loss as it is on the device; `get_scale` would wait for it."""
        scale: Tensor = self._scaler.scale(self._one)
        return scale


def _sum_over_ranks(engine: DdpEngine, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum one bucket over the ranks, count its bytes, and mark the first and the last one."""
    gradients = bucket.buffer()
    engine.exchanged_bytes += gradients.nbytes
    if bucket.index() == 0:
        engine.marks.exchange_begins()
    if bucket.is_last():
        engine.exchange_is_whole = True
        engine.marks.gradients_ready()
    work = dist.all_reduce(gradients, async_op=True)
    done: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda future: future.value()[0]
    )
    return done


def _plus_zeros(loss: Tensor, module: nn.Module) -> Tensor:
    """Add a sum of nothing of every parameter, whose gradient is zero even where one is not."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            loss = loss + parameter.reshape(-1)[:0].sum()
    return loss


def _not_exchanged(names: list[str]) -> BatchscapeError:
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return BatchscapeError(
        "with several ranks, parameters that the first samples used must have a part in the loss "
        f"of the last micro-step of every optimizer step; on this rank these have none: {some}. "
        "Add zero times their sum to the model's loss, or train on one rank"
    )


def _check_strides(module: nn.Module) -> None:
    """Refuse gradients laid out unlike their parameter: fused kernels then update wrongly."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
            msg = (
                f"the gradient of {name} has strides {parameter.grad.stride()}, its parameter "
                f"{parameter.stride()}; fused optimizers need them equal"
            )
            raise RuntimeError(msg)
