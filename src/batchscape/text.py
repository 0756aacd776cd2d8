"""Words of messages: counts, lists, durations, sizes, and suggestions for unknown names."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches

from batchscape.errors import ConfigError

DURATIONS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of each unit, the longest first."""
SIZES = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "bytes": 1.0}
"""Bytes of each unit, the largest first."""
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def count_text(count: float, one: str, more: str = "") -> str:
    """Write how many there are: `1 run`, `3 runs`; `more` is the plural that takes no s."""
    return f"{count} {one if count == 1 else more or f'{one}s'}"


def list_text(words: Iterable[object], last: str = "or", most: int | None = None) -> str:
    """Write a list: `a, b or c`; of more words than `most` the first ones: `a, b and 3 more`.

    An empty `last` is for values: `a, b, c`.
    """
    texts = [*map(str, words)]
    if most is not None and len(texts) > most:
        texts, last = [*texts[:most], f"{len(texts) - most} more"], "and"
    end = f" {last} " if last else ", "
    return end.join([", ".join(texts[:-1]), *texts[-1:]] if texts[1:] else texts)


def near_names(name: str, names: Iterable[str], most: int = 1, share: float = 0.6) -> list[str]:
    """Return the names spelled most like another, with at least a `share` of equal letters."""
    return get_close_matches(name, [*names], most, share)


def did_you_mean(names: Sequence[str]) -> str:
    """End a message about an unknown name with the names that may be meant."""
    return f"; did you mean {list_text(names)}?" if names else "."


def suggest(name: str, names: Collection[str]) -> str:
    """End a message about an unknown name with the one that may be meant, and all there are."""
    listed = f" Known here: {', '.join(names)}" if names else ""
    return did_you_mean(near_names(name, names)) + listed


def near_multiples(value: int, unit: int) -> str:
    """Write the multiples of a unit next to a value, but 0."""
    below = value // unit * unit
    return list_text(near for near in (below, below + unit) if near)


def unit_of(amount: float, units: Mapping[str, float]) -> str:
    """Return the first unit that an amount reaches, else the one of size 1."""
    base = next((unit for unit, size in units.items() if size == 1), "")
    return next((unit for unit, size in units.items() if abs(amount) >= size), base)


def duration_text(seconds: float) -> str:
    """Write a duration in the unit that fits it, with three significant digits."""
    return _amount_text(seconds, DURATIONS)


def size_text(size: float) -> str:
    """Write a number of bytes in the unit that fits it, with three significant digits."""
    return _amount_text(size, SIZES)


def _amount_text(amount: float, units: Mapping[str, float]) -> str:
    if math.isinf(amount):
        return "∞"
    unit = unit_of(amount, units)
    number = amount / units[unit]
    return f"{number:.3g} {unit}" if abs(number) < 999.5 else f"{number:,.0f} {unit}"


def parse_duration(text: str) -> float:
    """Return the seconds of a duration in d, h, m or s, as in `1h30m`; others are refused."""
    parts = _PART.findall(text)
    seconds = sum(float(number) * DURATIONS[unit.replace("m", "min")] for number, unit in parts)
    if "".join(map("".join, parts)) != text or not 0 < seconds < math.inf:
        raise ConfigError(
            "a duration is above 0, in numbers with d, h, m or s, as 90s, 30m, 2h or 1h30m; got "
            f"{text!r}"
        )
    return seconds
