"""Texts that other programs write, and the numbers in them."""

from __future__ import annotations

import math
import re
import stat
from pathlib import Path

from batchscape.config.metrics import GEOMETRY_NAMES, TimeUnit
from batchscape.errors import RecordError
from batchscape.geometry import COUNT_LIMIT


def lines_of(content: bytes) -> list[str]:
    """Return the lines of a text that are not empty; a bare carriage return ends one too."""
    return [line for line, _ in drawn_lines_of(content)]


def drawn_lines_of(content: bytes) -> list[tuple[str, bool]]:
    """Return the lines of a text, and whether a carriage return alone goes before each."""
    return [
        (part, number > 0)
        for line in content.decode(errors="replace").split("\n")
        for number, part in enumerate(line.split("\r"))
        if part
    ]


def whole_lines(content: bytes) -> bytes:
    """Return a text without a last line that has no end: its writer may be in the midst of it."""
    return content[: content.rfind(b"\n") + 1]


def content_of(path: Path) -> bytes | None:
    """Return what a file holds; None: it is not there."""
    try:
        # To open a pipe waits for its other end, and a device may not end.
        if not stat.S_ISREG(path.stat().st_mode):
            msg = (
                f"{path} is no regular file: metrics are read while the program writes them and "
                "once more at its end"
            )
            raise RecordError(msg)
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}"
        raise RecordError(msg) from None


_COUNTS = {
    *("optimizer_step", "samples", "tokens", "eval_labels"),
    *GEOMETRY_NAMES,
}
# As `f"{count:,}"` prints it. A comma elsewhere may be a decimal one, and is refused.
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf|infinity)", re.I)
_SECONDS: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}


def as_float(value: object, where: str) -> float:
    """Return a number; not a number and infinity are numbers."""
    if isinstance(value, str):
        # At least what `float` takes, less what only Python writes: `1_000`, other digits.
        if _NUMBER.fullmatch(value.strip()):
            return float(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    msg = f"{where} should be a number, got {_short(value)}"
    raise RecordError(msg)


def as_count(value: object, where: str) -> int:
    """Return a whole number from 0 on."""
    count = value
    if isinstance(value, str) and _THOUSANDS.fullmatch(value.strip()):
        count = value.replace(",", "")
    if isinstance(count, str) and re.fullmatch(r"[0-9]{1,19}", count.strip()):
        count = int(count)
    if not isinstance(count, int) or isinstance(count, bool):
        number = as_float(count, where)
        # A float above 2**53 no longer tells neighbours apart.
        count = int(number) if number.is_integer() and abs(number) <= 2**53 else -1
    if not 0 <= count < COUNT_LIMIT:
        msg = f"{where} should be a whole number from 0 on, got {_short(value)}"
        raise RecordError(msg)
    return count


def as_row(
    values: dict[str, object], units: dict[str, TimeUnit], where: str
) -> dict[str, int | float]:
    """Return the values of columns as numbers of the columns' units.

    A time that is nan or infinite is left out.
    """
    row: dict[str, int | float] = {}
    for name, value in values.items():
        place = f"{where}: {name}"
        if name in _COUNTS:
            row[name] = as_count(value, place)
            continue
        number = as_float(value, place)
        if name.endswith("_s"):
            number *= _SECONDS[units.get(name, "s")]
            if number < 0:
                msg = f"{place} should be a time, got {_short(value)}"
                raise RecordError(msg)
            if not math.isfinite(number):
                continue
        row[name] = number
    return row


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
