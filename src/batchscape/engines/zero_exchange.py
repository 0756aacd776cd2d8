"""Gradients that ZeRO exchanges: how many bytes, and whether all arrive."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from batchscape.errors import BatchscapeError
from batchscape.text import list_text


def bytes_of_exchange(module: nn.Module, stage: int, ranks: int) -> int:
    """Return the bytes of gradients that one exchange is given by each rank."""
    parts = ranks if stage == 3 else 1
    trained = (p for p in module.parameters() if p.requires_grad)
    return sum(-(-p.numel() // parts) * parts * p.element_size() for p in trained)


def observed(
    collective: Callable[..., Any], observe: Callable[[Tensor], None]
) -> Callable[..., Any]:
    """Return a collective that gives its tensor to `observe` before it starts."""

    def wrapper(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401  (passed on as they are)
        observe(keywords.get("input_tensor", keywords.get("tensor", (*arguments, None)[0])))
        return collective(*arguments, **keywords)

    return wrapper


class Arrivals:
    """Which parameters have had a gradient in a micro-step."""

    def __init__(self, module: nn.Module, stage: int) -> None:
        self._stage = stage
        self._names = [name for name, p in module.named_parameters() if p.requires_grad]
        self._arrived: set[str] = set()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._arrive, name))

    def check(self) -> None:
        """Begin anew, if every parameter has had its gradient."""
        missing = [name for name in self._names if name not in self._arrived]
        self._arrived.clear()
        if missing:
            msg = (
                f"with zero_stage={self._stage} every trained parameter must have a part in the "
                "loss of every micro-step on every rank; on this rank these have none: "
                f"{list_text(missing, 'and', 5)}. Add zero times their sum to the model's loss, "
                "or use engine.zero_stage=0 or 1"
            )
            raise BatchscapeError(msg)

    def _arrive(self, name: str, _parameter: Tensor) -> None:
        self._arrived.add(name)
