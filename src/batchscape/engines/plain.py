"""One rank that trains by itself, in plain PyTorch: the base of wrapped engines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from batchscape.config import Optimizer
from batchscape.engines.base import Reported
from batchscape.engines.optimizers import build_optimizer, clip_gradients, set_hyperparameters
from batchscape.engines.precision import CastOnce
from batchscape.measure.clock import NoMarks, StepMarks
from batchscape.record.heartbeat import Phase, beat


class PlainEngine:
    """Accumulates gradients and updates; exchanges nothing.

    In float16 the loss is scaled up before the backward, so that small gradients stay above the
    smallest float16, and gradients are scaled down before they are clipped. They are judged once
    they are summed, so that every rank finds the same overflow and skips the same update.

    A parameter that the loss of a whole batch does not use has a gradient of zero, on every number
    of ranks: its weights decay and its moments fade.
    """

    exchanges_every_micro_step = False
    gradients_are_whole = True
    micro_gradients_are_whole = True
    state_is_whole = True
    gradient_bytes = 0

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        precision: str,
        updated: nn.Module | None = None,
    ) -> None:
        self.module = module
        self.exchanged_bytes = 0
        self.marks: StepMarks = NoMarks()
        self.skipped: Tensor | None = None
        device = next(module.parameters()).device
        self._device_type = device.type
        self._precision = precision
        self._casts = CastOnce(device.type, precision)
        self._has_checked_strides = False
        self._scaler = GradScaler(device.type, enabled=precision == "float16")
        self._one = torch.ones((), device=device)
        self._optimizer = build_optimizer(optimizer, module if updated is None else updated)

    @property
    def gradient_scale(self) -> Tensor | float:
        """Factor of the gradients between backward and optimizer step."""
        return self._scale() if self._scaler.is_enabled() else 1.0

    def micro_step(self, inputs: Tensor, labels: Tensor, weight: float, *, last: bool) -> Tensor:
        """Do one forward and backward."""
        with self._casts.forward(last=last):
            loss: Tensor = self.module(inputs, labels)[0]
        self._casts.keep_order(loss)
        beat(Phase.BACKWARD)
        self._scaler.scale(loss * weight).backward()
        if last:
            self.marks.gradients_ready()
        return loss.detach()

    def optimizer_step(self, settings: Optimizer, factor: float) -> Tensor:
        """Clip the whole gradient, update the parameters, clear the gradients."""
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self._has_checked_strides:
            _check_strides(self.module)
            self._has_checked_strides = True
        norm = self._clip(settings.gradient_clip_norm)
        set_hyperparameters(self._optimizer, settings, factor)
        scale_before = self._scale() if self._scaler.is_enabled() else None
        self._update()
        if scale_before is not None:
            # The scale falls exactly when an update is skipped; to see it takes no waiting.
            self.skipped = self._scale() < scale_before
        self.forget_gradients()
        return norm

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and the right predictions, of the model as written."""
        # A call of the module would run code compiled for the shapes of the training.
        loss, right = self.module.forward(inputs, labels)
        return loss, right

    def forget_gradients(self) -> None:
        """Drop the gradients of the micro-steps since the last optimizer step."""
        self._casts.forget()
        self.module.zero_grad(set_to_none=True)

    def reported(self) -> Reported:
        """Return one rank; PyTorch has no notion of a batch."""
        return Reported(data_parallel_size=1)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the model, the optimizer and the loss scale."""
        return {
            "model": self.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scaler": self._scaler.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.module.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        """Drop the model."""
        self._casts.forget()
        self.module = nn.Identity()
        self.marks = NoMarks()

    def _clip(self, largest_norm: float | None) -> Tensor:
        """Take the scale of the loss out of the gradient and clip it; return its norm before."""
        self._scaler.unscale_(self._optimizer)
        return clip_gradients(self.module, largest_norm)

    def _update(self) -> None:
        """Update the parameters, or lower the scale of the loss where a gradient overflowed."""
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _scale(self) -> Tensor:
        """Return the scale of the loss as it is on the device; `get_scale` would wait for it."""
        scale: Tensor = self._scaler.scale(self._one)
        return scale


def _check_strides(module: nn.Module) -> None:
    """Refuse gradients laid out unlike their parameter: fused kernels then update wrongly."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
            raise RuntimeError(
                f"the gradient of {name} has strides {parameter.grad.stride()}, its parameter "
                f"{parameter.stride()}; fused optimizers need them equal"
            )
