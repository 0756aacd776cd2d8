"""Engines: how one optimizer step is executed.

Importing this package is light: what watches a program of the user's own passes through it and
needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchscape.engines.base import Engine
    from batchscape.engines.build import begins_in_parts, build_engine, model_outline

__all__ = ["Engine", "begins_in_parts", "build_engine", "model_outline"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  (PEP 562: the type is that of the name)
    """Import torch's part of the package at the first use of a name."""
    if name == "Engine":
        from batchscape.engines.base import Engine

        return Engine
    if name in __all__:
        from batchscape.engines import build

        return getattr(build, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
