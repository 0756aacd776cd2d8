"""An exponential moving average of the weights, for evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WeightAverage"]


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
        Its trained parameters are averaged, in their own type. Buffers are not: the average is
        evaluated with those that the module has.
    half_life_tokens : float
        Tokens of training after which a weight counts half.
    """

    def __init__(self, module: nn.Module, half_life_tokens: float) -> None:
        self._half_life_tokens = half_life_tokens
        self._parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self._average = [p.detach().clone() for p in self._parameters]
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
        self._mass += part * (1 - self._mass)
        # The new weights' share of all that counts: all of it at the first step.
        torch._foreach_lerp_(self._average, self._parameters, part / self._mass)

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
        """Return what a checkpoint holds of the average."""
        return {"mass": self._mass, "average": self._average}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""
        self._mass = state["mass"]
        for mine, theirs in zip(self._average, state["average"], strict=True):
            mine.copy_(theirs)

    def _exchange(self) -> None:
        """Let weights and averages change places in memory: nothing is copied or rounded."""
        trained: list[Tensor] = []
        for parameter, average in zip(self._parameters, self._average, strict=True):
            trained.append(parameter.data)
            parameter.data = average
        self._average = trained
