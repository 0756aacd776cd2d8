"""Models: the smallest honest workloads, and the doors to the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchscape.models.build import LossModule, build_model, parameter_count

__all__ = ["LossModule", "build_model", "parameter_count"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  (a class or a function)
    # A plan asks what a model is made of and must not wait for torch.
    if name in __all__:
        from batchscape.models import build

        return getattr(build, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
