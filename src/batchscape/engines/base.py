"""What the training loop asks of an engine."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from batchscape.config import Optimizer
from batchscape.measure.clock import StepMarks

__all__ = ["Engine"]


class Engine(Protocol):
    """Executes micro-steps and optimizer steps of one rank.

    An engine owns the wrapped model and its optimizer. The loop owns the samples, the learning
    rate, the clock and the records.
    """

    module: nn.Module
    """The model itself, unwrapped: evaluated and checkpointed."""

    exchanged_bytes: int
    """Gradient bytes that this rank has given to the exchange so far."""

    marks: StepMarks
    """Told once an optimizer step, as they happen, of the first bucket given to the exchange, of
    the last local gradient, and of the end of the exchange; a rank that trains alone only tells
    of the gradient."""

    gradients_are_whole: bool
    """Whether every rank holds the whole gradient of the global batch in its parameters' `grad`,
    between the last micro-step and the optimizer step; not so where gradients are sharded."""

    skipped: Tensor | None
    """Whether the last optimizer step left the parameters alone, because a gradient overflowed:
    a scalar on the device, the same on every rank. None where that cannot happen."""

    @property
    def gradient_scale(self) -> Tensor | float:
        """Factor of the gradients between backward and optimizer step.

        1.0, or with a scaled loss a scalar on the device. The squared norm of a micro-gradient is
        to be divided by its square.
        """

    def micro_step(self, inputs: Tensor, targets: Tensor, weight: float, *, last: bool) -> Tensor:
        """Do one forward and backward.

        Parameters
        ----------
        inputs, targets : Tensor
            One micro-batch, on the device.
        weight : float
            Factor of the sum of losses: one over the global number of targets.
        last : bool
            Whether this is the last micro-step of the optimizer step, after which the gradients
            are those of the whole global batch on every rank.

        Returns
        -------
        Tensor, scalar
            The sum of the losses of the micro-batch, detached.
        """

    def optimizer_step(self, settings: Optimizer, factor: float) -> Tensor:
        """Clip the whole gradient, update the parameters, clear the gradients.

        Parameters
        ----------
        settings : Optimizer
            Of the stage; every step may have others of the same kind.
        factor : float
            Learning rate over its peak.

        Returns
        -------
        Tensor, scalar
            The norm of the whole gradient before clipping; not finite in a skipped step.
        """

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the model, the optimizer and the loss scale."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""

    def close(self) -> None:
        """Drop the wrapped model, so that the process group can be ended."""
