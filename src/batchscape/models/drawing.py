"""Parameters that their layers do not draw, because the model will."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

_DRAWS = {nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_}
"""What linear layers and embeddings draw their parameters with."""


class Undrawn(TorchFunctionMode):
    """Layers built in this context leave their parameters unset, for the model to draw.

    Drawn by a thread at some 150 million numbers a second, parameters that are drawn once more by
    their model would take twice the time, seconds for each billion.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401  (as torch declares it)
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do what is called, but draw nothing."""
        kwargs = kwargs or {}
        if func in _DRAWS:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
