"""Numbers as other programs write them: texts, floats that are counts, thousands separators."""

from __future__ import annotations

import math
import re

from batchscape.config.metrics import TimeUnit
from batchscape.errors import RecordError
from batchscape.geometry import COUNT_LIMIT

__all__ = ["as_count", "as_float", "as_row"]

_COUNTS = {
    *("optimizer_step", "samples", "tokens", "eval_labels"),
    *("world_size", "micro_batch_size", "gradient_accumulation_steps"),
    *("global_batch_size", "tokens_per_optimizer_step"),
}
# As `f"{count:,}"` prints it. A comma elsewhere may be a decimal one, and is refused.
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf|infinity)", re.I)
_SECONDS: dict[TimeUnit, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}


def as_float(value: object, where: str) -> float:
    """Return a number; not a number and infinity are numbers.

    Raises
    ------
    RecordError
        If it is none, with `where` it was found.
    """
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
    """Return a whole number from 0 on.

    Raises
    ------
    RecordError
        If it is none, with `where` it was found.
    """
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

    Parameters
    ----------
    values : dict
        By name of the column, as the program wrote them.
    units : dict of str to str
        Unit of a time, by name of the column; seconds where it has none.
    where : str
        Begins a message.

    Raises
    ------
    RecordError
        If a value is no number, or a time is negative.
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
