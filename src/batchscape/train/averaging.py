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

from batchscape.engines.shards import as_part_of, gather_whole, local_part, part_for


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

    @torch.no_grad()
    def update(self, tokens: int) -> None:
        """Take in the weights after an optimizer step.

        Parameters
        ----------
        tokens : int
            Of the step.
        """
        part = -math.expm1(-math.log(2) * tokens / self._half_life_tokens)
        kept = self._mass * (1 - part)
        self._mass = kept + part
        # The past's share of all that counts: nothing of it at the first step.
        get_ema_multi_avg_fn(kept / self._mass)(self._average, self._weights, None)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average in the place of the weights; they come back untouched.

        Before the first step there is no average, and the weights stay.
        """
        if self._mass == 0:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the average; on all ranks together."""
        average = [
            gather_whole(as_part_of(p, mine)) if isinstance(p, DTensor) else mine
            for p, mine in zip(self._parameters, self._average, strict=True)
        ]
        return {"mass": self._mass, "average": average}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        self._mass = state["mass"]
        for p, mine, average in zip(self._parameters, self._average, state["average"], strict=True):
            mine.copy_(local_part(part_for(p, average)))

    @torch.no_grad()
    def _exchange(self) -> None:
        """Let weights and averages change places: nothing is rounded.

        Whole ones do in memory. What gathers parts has their place in memory, so that these are
        copied, one at a time.
        """
        for i, (weight, average) in enumerate(zip(self._weights, self._average, strict=True)):
            if isinstance(weight, nn.Parameter):
                weight.data, self._average[i] = average, weight.data
            else:
                trained = weight.clone()
                weight.copy_(average)
                average.copy_(trained)
