"""One disagreement between files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Disagreement"]


@dataclass(frozen=True)
class Disagreement:
    """What disagrees, and how to mend it."""

    rule: str
    """Short name of the rule."""
    severity: Literal["error", "warning"]
    """`error`: the run refuses to start, or trains with another batch or arithmetic than a file
    says; `warning`: a trap that these files alone do not decide."""
    message: str
    """Files, keys and values, and what the library makes of them."""
    fix: str
