"""An exponential moving average of the weights, for evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from batchscape.engines.distributed import as_part_of, gather_whole, local_part, part_for


class WeightAverage:
    """The average of the weights after each optimizer step, recent ones counting more.

    With H the half-life and n_i the tokens of step i, the weights after it count as much as the
    part of the past that they stand for: w_i = (1 - 2^(-n_i / H)) 2^(-(tokens since step i) / H),
    divided by the sum of all w. The initial weights have no part in it. In tokens, the average is
    therefore the same thing for every global batch (Zhang et al. 2024, arXiv 2410.21676, use such
    an average instead of a decaying learning rate).

    Parameters
    ----------
    module : nn.Module
        Its trained parameters are averaged, in their own type, each rank's parts of those that
        are cut. Buffers are not: the average is evaluated with those that the module has.
    half_life_tokens : float
        Tokens of training after which a weight counts half.
    """

    def __init__(self, module: nn.Module, half_life_tokens: float) -> None:
        self._half_life_tokens = half_life_tokens
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._weights = [
            local_part(p.detach()) if isinstance(p, DTensor) else p for p in self._parameters
        ]
        self._average = [weight.detach().clone() for weight in self._weights]
        self._mass = 0.0
        """Sum of all w, which the average is divided by."""

    @torch.no_grad()
    def update(self, tokens: int) -> None:
        """Take in the weights after an optimizer step.

        Parameters
        ----------
        tokens : int
            Of the step.
        """
        step_mass = -math.expm1(-math.log(2) * tokens / self._half_life_tokens)
        past_mass = self._mass * (1 - step_mass)
        self._mass = past_mass + step_mass
        # The first step has no past, so its weights replace the initial ones.
        get_ema_multi_avg_fn(past_mass / self._mass)(self._average, self._weights, None)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average in the place of the weights; they come back untouched.

        Before the first step there is no average, and the weights stay.
        """
        if self._mass == 0:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the average; on all ranks together."""
        average = [
            gather_whole(as_part_of(p, part)) if isinstance(p, DTensor) else part
            for p, part in zip(self._parameters, self._average, strict=True)
        ]
        return {"mass": self._mass, "average": average}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._mass = state["mass"]
        for p, part, full in zip(self._parameters, self._average, state["average"], strict=True):
            part.copy_(local_part(part_for(p, full)))

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap weights and averages, without rounding.

        Whole parameters swap their tensors. Parts are copied, one at a time: FSDP gathers from
        the memory that they lie in.
        """
        for i, (weight, average) in enumerate(zip(self._weights, self._average, strict=True)):
            if isinstance(weight, nn.Parameter):
                weight.data, self._average[i] = average, weight.data
            else:
                trained = weight.clone()
                weight.copy_(average)
                average.copy_(trained)
