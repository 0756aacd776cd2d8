"""What the training loop asks of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from batchscape.config import Optimizer
from batchscape.measure.clock import StepMarks

__all__ = ["Engine", "Reported"]


@dataclass(frozen=True)
class Reported:
    """A geometry as the library behind an engine has it, asked at run time.

    None where the library has no notion of a number: then nothing can contradict it.
    """

    data_parallel_size: int
    """Ranks that the library exchanges gradients over."""
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    global_batch_size: int | None = None


class Engine(Protocol):
    """Executes micro-steps and optimizer steps of one rank.

    An engine owns the wrapped model and its optimizer. The loop owns the samples, the learning
    rate, the clock and the records.
    """

    module: nn.Module
    """The model itself, unwrapped: evaluated and checkpointed."""

    exchanged_bytes: int
    """Gradient bytes that this rank has given to the exchange so far, counted as it happens."""

    exchanges_every_micro_step: bool
    """Declared: whether gradients are exchanged in every micro-step, not in the last one only."""

    gradient_bytes: int
    """Declared: gradient bytes that this rank gives to one exchange; 0 for a rank alone. The bytes
    of an optimizer step are these, times the micro-steps where each of them exchanges."""

    marks: StepMarks
    """Told once an optimizer step, as they happen, of the first bucket given to the exchange, of
    the last local gradient, and of the end of the exchange; a rank that trains alone only tells
    of the gradient."""

    gradients_are_whole: bool
    """Whether every rank holds the whole gradient of the global batch in its parameters' `grad`,
    between the last micro-step and the optimizer step; not so where gradients are sharded."""

    micro_gradients_are_whole: bool
    """Whether a hook on each parameter sees this rank's own gradient of every micro-step, before
    any exchange; where not, the gradient noise scale is not sampled."""

    state_is_whole: bool
    """Whether every rank holds the whole model and optimizer. Where not, ranks forward, save and
    evaluate together, the same number of times."""

    skipped: Tensor | None
    """Whether the last optimizer step left the parameters alone, because a gradient overflowed:
    a scalar on the device, the same on every rank. None where that cannot happen."""

    @property
    def gradient_scale(self) -> Tensor | float:
        """Factor of the gradients between backward and optimizer step.

        1.0, or with a scaled loss a scalar on the device. The squared norm of a micro-gradient is
        to be divided by its square.
        """

    def micro_step(self, inputs: Tensor, labels: Tensor, weight: float, *, last: bool) -> Tensor:
        """Do one forward and backward.

        Parameters
        ----------
        inputs, labels : Tensor
            One micro-batch, on the device.
        weight : float
            Factor of the sum of losses: one over the global number of labels.
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

    def forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Do a forward of the model as it was written, not as it was compiled.

        The caller chooses evaluation mode, gradients and arithmetic. Where `state_is_whole` is
        false, every rank calls it at the same time.

        Returns
        -------
        tuple of Tensor, scalars
            The sum of the losses, and how many predictions were right.
        """

    def forget_gradients(self) -> None:
        """Drop what the micro-steps since the last optimizer step have brought."""

    def reported(self) -> Reported:
        """Ask the library for the geometry that it has."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the model, the optimizer and the loss scale.

        Called on every rank at the same time; what rank 0 returns is written, and is whole.
        """

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""

    def close(self) -> None:
        """Drop the wrapped model, so that the process group can be ended."""
