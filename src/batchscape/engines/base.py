"""What the training loop asks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

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

    on_gradients: Callable[[], None]
    """Called once an optimizer step, when the last local gradient is there; what follows is
    exposed exchange, clipping and the update."""

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

    def optimizer_step(self, learning_rate: float) -> Tensor:
        """Clip the whole gradient, update the parameters, clear the gradients.

        Returns
        -------
        Tensor, scalar
            The norm of the whole gradient before clipping.
        """

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the model and the optimizer."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""

    def close(self) -> None:
        """Drop the wrapped model, so that the process group can be ended."""
