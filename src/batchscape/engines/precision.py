"""The arithmetic of forward passes, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from batchscape.engines.reach import graph_of

_LOWER_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_RUNS_FIRST = 2**64 - 1
"""Sequence number of nodes that a backward runs as soon as it can, as those that accumulate."""


def autocast(device_type: str, precision: str) -> torch.autocast:
    """Return a context in which operations for which it is safe compute in a lower precision."""
    lower_type = _LOWER_TYPES.get(precision)
    return torch.autocast(device_type, lower_type, enabled=lower_type is not None)


@contextmanager
def casts_dropped() -> Iterator[None]:
    """Let autocast keep no weight that it has cast, as it does to the end of its region.

    Where ranks hold parts of a model, all of them together would be the whole of it.
    """
    cache_before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cache_before)


class CastOnce:
    """Autocast for the micro-steps of an optimizer step, which casts every weight once.

    Autocast keeps the weights that it has cast until its outermost region ends. Here that is one
    around all micro-steps, in which nothing is lowered, so that backwards are as they would be
    without. It ends with the last forward: the copies are freed as the last backward goes, before
    anything changes the weights. So one micro-step takes the memory that it takes with autocast
    alone. Several take hardly more at their peak, but where activations are computed anew: there
    the copies stay through the backwards (docs/speed.md).
    """

    def __init__(self, device_type: str, precision: str) -> None:
        self._device_type = device_type
        self._precision = precision
        self._region: torch.autocast | None = None
        """Open between the first micro-step and the last."""
        self._in_order = True

    @contextmanager
    def forward(self, *, last: bool) -> Iterator[None]:
        """Return the context of the forward of a micro-step."""
        if self._region is None and not last and self._precision in _LOWER_TYPES:
            self._region = torch.autocast(self._device_type, enabled=False)
            self._region.__enter__()
            self._in_order = False
        with autocast(self._device_type, self._precision):
            yield
        if last:
            self.forget()

    def keep_order(self, loss: Tensor) -> None:
        """Let gradients of kept copies be cast and accumulated as soon as they are there.

        Called after every forward. A backward goes from young nodes to old ones, and from the
        second micro-step on the nodes of the casts are the oldest of all: the gradients of all
        copies would be held until the end, and their exchange would wait as long.
        """
        if self._in_order:
            return
        self._in_order = True
        # The name of the node of a cast is torch's own to choose.
        with torch.enable_grad():
            cast = torch.ones(1, dtype=torch.float32, requires_grad=True).double()
        name_of_cast = next(graph_of(cast)).name()
        for node in graph_of(loss):
            # Casts of what is no weight were made in this micro-step, and are young.
            if node.name() == name_of_cast and hasattr(node.next_functions[0][0], "variable"):
                node._set_sequence_nr(_RUNS_FIRST)  # type: ignore[attr-defined]

    def forget(self) -> None:
        """Drop the copies; the next forward casts anew."""
        if self._region is not None:
            self._region.__exit__(None, None, None)
            self._region = None
            self._in_order = True
