"""Where prepared data lie."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """Return the folder that holds prepared data: `$XDG_CACHE_HOME/batchscape/data`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "batchscape" / "data"
