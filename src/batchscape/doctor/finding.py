"""One line of the examination."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Probe", "findings_of"]


@dataclass(frozen=True)
class Finding:
    """What was found of one thing."""

    what: str
    status: Literal["ok", "missing", "broken", "not needed", "not probed"]
    """`missing`: not there; `broken`: there, and does not work; `not needed`: of no use here;
    `not probed`: only where it is asked for."""
    detail: str
    repair: str | None = None
    """What installs, repairs or probes it, mostly a command."""
    needed: bool = False
    """Whether the default sweep cannot do without it."""

    @property
    def is_obstacle(self) -> bool:
        """Whether the default sweep fails because of it."""
        return self.needed and self.status in {"missing", "broken"}


Probe = Callable[[], list[Finding]]


def findings_of(what: str, probe: Probe) -> list[Finding]:
    """Return what a probe finds; one that fails is itself a finding.

    Parameters
    ----------
    what : str
        Name of the line that stands for a probe that fails.
    probe : callable
    """
    try:
        return probe()
    except Exception as error:  # noqa: BLE001  (whatever is broken here is to be shown)
        said = str(error).strip().splitlines() or [""]
        return [Finding(what, "broken", f"{type(error).__name__}: {said[0]}".rstrip(": "))]
