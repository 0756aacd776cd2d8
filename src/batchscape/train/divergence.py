"""When a training counts as diverged: one rule, judged alike on every rank.

A run is diverged at the first optimizer step of which one holds:

* its loss is not finite;
* the norm of its gradient is not finite, and the update was not skipped (in float16 an overflow is
  answered by a smaller loss scale and is no divergence);
* its loss, like those of the 19 steps before it, is above 10 times the lowest loss of the first 10
  optimizer steps. That is about the loss of the untrained model, which a training that has not
  exploded stays below; the lowest of several, so that an explosion in the very first steps does
  not raise the bar. Where it is not above 0, this part of the rule does not apply.

A held-out loss that is not finite is divergence as well. The losses are those of the whole global
batch, reduced over the ranks, which every rank has from the same exchange: nothing more is asked,
nobody waits, and all ranks come to the same verdict at the same step. It comes late, by at most two
drains of the recorder.
"""

from __future__ import annotations

import math
from typing import Any

FIRST_STEPS = 10
"""Their lowest loss is the level that later losses are compared with."""
FACTOR = 10.0
"""A loss above this many times that level is too high."""
STEPS = 20
"""Consecutive optimizer steps with too high a loss that are divergence."""


class DivergenceRule:
    """Judges one optimizer step after the other."""

    def __init__(self) -> None:
        self._lowest_loss = math.inf
        """Of the first optimizer steps."""
        self._high_steps = 0
        """Optimizer steps in a row, up to the last one, whose loss was too high."""

    def judge(self, optimizer_step: int, loss: float, *, norm_is_finite: bool) -> str | None:
        """Judge the next optimizer step.

        Parameters
        ----------
        optimizer_step : int
            From 1; in order, none left out.
        loss : float
            Of the whole global batch.
        norm_is_finite : bool
            Whether the norm of its gradient is, on all ranks; true of a skipped update.

        Returns
        -------
        str or None
            Why the training is diverged; None where it is not.
        """
        if not math.isfinite(loss):
            return f"the loss of optimizer step {optimizer_step} is not finite"
        if not norm_is_finite:
            return f"the gradient norm of optimizer step {optimizer_step} is not finite"
        if optimizer_step <= FIRST_STEPS:
            self._lowest_loss = min(self._lowest_loss, loss)
        if not 0 < self._lowest_loss < math.inf:
            return None
        self._high_steps = self._high_steps + 1 if loss > FACTOR * self._lowest_loss else 0
        if self._high_steps < STEPS:
            return None
        return (
            f"the loss exploded: {loss:.4g} at optimizer step {optimizer_step}, the last of "
            f"{STEPS} in a row above {FACTOR:g} x {self._lowest_loss:.4g}, the lowest loss "
            f"of the first {FIRST_STEPS}"
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {"level": self._lowest_loss, "above": self._high_steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._lowest_loss, self._high_steps = float(state["level"]), int(state["above"])
