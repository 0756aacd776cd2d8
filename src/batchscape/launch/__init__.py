"""Running the cells of a sweep: processes, devices, and how each run ended.

Importing this package is light: a worker process passes through it and needs none of the launcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchscape.launch.launcher import Launcher
    from batchscape.launch.result import RunResult, SweepResult

__all__ = ["Launcher", "RunResult", "SweepResult"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  (PEP 562: the type is that of the name)
    """Import the launcher when it is first asked for."""
    if name == "Launcher":
        from batchscape.launch.launcher import Launcher

        return Launcher
    if name in __all__:
        from batchscape.launch import result

        return getattr(result, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
