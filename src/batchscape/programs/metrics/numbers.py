"""Texts that other programs write, and the numbers in them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from batchscape.config.metrics import GEOMETRY_NAMES, TimeUnit
from batchscape.errors import RecordError

_COUNTS = {
    *("optimizer_step", "samples", "tokens", "eval_labels"),
    *GEOMETRY_NAMES,
}
# As `f"{count:,}"` prints it. A comma elsewhere may be a decimal one, and is refused.
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+")
_SECONDS: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}


def lines_of(content: bytes) -> list[str]:
    """Return the lines of a text that are not empty; a bare carriage return ends one too."""
    return [line for line in re.split(r"[\r\n]", content.decode(errors="replace")) if line.strip()]


def whole_lines(content: bytes) -> bytes:
    """Return a text without a last line that has no end: its writer may be in the midst of it."""
    return content[: content.rfind(b"\n") + 1]


def content_of(path: Path) -> bytes:
    """Return what a file holds; nothing where it is not there."""
    if path.exists() and not path.is_file():  # to open a pipe would wait for its other end
        raise RecordError(f"{path} is no regular file: metrics are read from files")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None


def as_float(value: object, where: str) -> float:
    """Return a number; not a number and infinity are numbers."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise RecordError(f"{where} should be a number, got {value!r:.60}")


def as_count(value: object, where: str) -> int:
    """Return a whole number from 0 on."""
    has_thousands = isinstance(value, str) and _THOUSANDS.fullmatch(value.strip())
    number = as_float(str(value).replace(",", "") if has_thousands else value, where)
    # A float above 2**53 no longer tells neighbours apart.
    if not number.is_integer() or not 0 <= number <= 2**53:
        raise RecordError(f"{where} should be a whole number from 0 on, got {value!r:.60}")
    return int(number)


def as_row(values: dict[str, object], units: dict[str, TimeUnit], where: str) -> dict[str, Any]:
    """Return the values of columns as numbers of the columns' units.

    A time that is nan, infinite or negative is left out.
    """
    row: dict[str, Any] = {}
    for name, value in values.items():
        place = f"{where}: {name}"
        if name in _COUNTS:
            row[name] = as_count(value, place)
        elif not name.endswith("_s"):
            row[name] = as_float(value, place)
        else:
            seconds = as_float(value, place) * _SECONDS[units.get(name, "s")]
            if 0 <= seconds < math.inf:
                row[name] = seconds
    return row
