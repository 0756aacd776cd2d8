"""Durations as people write them: 90s, 30m, 2h, 1h30m, 3d."""

from __future__ import annotations

import math
import re

from batchscape.errors import ConfigError

__all__ = ["parse_duration"]

_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def parse_duration(text: str) -> float:
    """Read a duration.

    Parameters
    ----------
    text : str
        Numbers with d, h, m or s, as in `1h30m`.

    Returns
    -------
    float
        Seconds, above zero.

    Raises
    ------
    ConfigError
        If it is anything else.
    """
    parts = _PART.findall(text)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if "".join(map("".join, parts)) != text or not 0 < seconds < math.inf:
        msg = f"a duration is numbers with d, h, m or s, as 90s, 30m, 2h or 1h30m; got {text!r}"
        raise ConfigError(msg)
    return seconds
