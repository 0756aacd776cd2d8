"""Norms of gradients of small batches, from which the noise of the gradient is estimated.

Every micro-step on every rank computes the gradient of a small part of the global batch, for free.
Hooks on the parameters see it before it is accumulated and before it is exchanged. Its norm, set
against that of the whole gradient, gives the gradient noise scale (`record/noise_scale.py`): micro-
steps against the accumulated gradient and ranks against the exchanged one are the same thing here.

Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
"""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from batchscape.geometry import BatchGeometry

_MOST_PARTS = 7
"""Micro-steps that a single one is cut into at most; more would make the step a slow one."""


class NoiseSample(NamedTuple):
    """Figures of one optimizer step from which the noise is estimated, on one rank."""

    small_batch_size: int
    """Samples behind each small gradient."""
    small_gradients: int
    """Small gradients in the step, over all ranks: n."""
    square_sum: Tensor
    """Sum of the squared norms of this rank's, a scalar.

    The n summands of the whole gradient are each the mean gradient of a small batch over n. The
    mean square of those means is thus n times this sum over all ranks."""


def is_sampled(optimizer_step: int, every: int | None) -> bool:
    """Return whether the noise is sampled in an optimizer step (counted from 0).

    Parameters
    ----------
    optimizer_step : int
    every : int or None
        `measure.noise_scale_every`; None: never.
    """
    return every is not None and (optimizer_step + 1) % every == 0


def small_batch_size(geometry: BatchGeometry) -> int | None:
    """Return the samples behind each small gradient of a sampled optimizer step.

    That is the micro-batch, where there are several. A single one is cut into the fewest equal
    parts, at most 7: a formula for unequal parts would have no whole number of samples to name.

    Parameters
    ----------
    geometry : BatchGeometry

    Returns
    -------
    int or None
        None where the step cannot be sampled: its one micro-batch has no such parts.
    """
    size = geometry.micro_batch_size
    if geometry.global_batch_size > size:
        return size
    parts = (n for n in range(2, _MOST_PARTS + 1) if size % n == 0)
    return next((size // n for n in parts), None)


class GradientSquares:
    """Sums the squared norms of the gradients of the backward passes done while it is entered.

    A hook fires once a parameter and backward pass, with the gradient of that pass alone, tied
    uses added up. It takes one norm and keeps no gradient: a reference to one would make autograd
    copy it instead of taking it over.

    Parameters
    ----------
    module : Module
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._hooks: list[RemovableHandle] = []
        self._norms: list[Tensor] = []
        device = self._parameters[0].device
        self._squares = torch.zeros((), dtype=torch.float64, device=device)

    def __enter__(self) -> GradientSquares:
        self._hooks = [p.register_hook(self._add) for p in self._parameters]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def square_sum(self, gradient_scale: Tensor | float) -> Tensor:
        """Return the sum of the squared norms.

        Norms are taken in the gradients' own precision and squared and added in float64, so that
        thousands of tensors lose nothing. The norms of one backward pass are added together, as
        thousands of small tensors would fragment memory, 0.2 GiB of it with 224 micro-steps.

        Parameters
        ----------
        gradient_scale : float or Tensor, scalar
            Factor of the loss beyond its weight, as in float16.

        Returns
        -------
        Tensor, scalar
            float64, on the device of the gradients; the host does not wait for it.
        """
        self._fold()
        return self._squares / gradient_scale / gradient_scale

    def _add(self, gradient: Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient))
        if len(self._norms) == len(self._parameters):
            self._fold()

    def _fold(self) -> None:
        if self._norms:
            self._squares += torch.stack(self._norms).double().square_().sum()
            self._norms = []
