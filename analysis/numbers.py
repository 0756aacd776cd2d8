"""Numbers as text: digits that the spread justifies, and units that fit the size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import ROUND_HALF_EVEN, Decimal
from typing import NamedTuple

MISSING = "—"
"""Written where there is no number."""

TIMES = "\N{MULTIPLICATION SIGN}"
"""Sign between factors; given by name because it looks like a letter."""

_SPREAD_DIGITS = 2
_MAX_DIGITS = 5
# Outside these powers of ten a number is written as a multiple of a power of ten.
_PLAIN_EXPONENTS = range(-4, 7)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Scale(NamedTuple):
    """A unit, and the factor that turns a recorded number into it."""

    unit: str
    factor: float


def memory_scale(values_gib: Iterable[float]) -> Scale:
    """Choose MiB or GiB for numbers recorded in GiB; one unit serves a whole column."""
    return Scale("GiB", 1.0) if _largest(values_gib) >= 1 else Scale("MiB", 1024.0)


def time_scale(values_s: Iterable[float]) -> Scale:
    """Choose ms or s for numbers recorded in seconds; one unit serves a whole column."""
    return Scale("s", 1.0) if _largest(values_s) >= 10 else Scale("ms", 1000.0)


def unit_of(figure: str) -> str:
    """Return the unit that ends the name of a figure; empty where it has none."""
    name = figure.removesuffix("_per_s")
    units = {"gib": "GiB", "s": "s", "pct": "%", "token": "J"}
    return units.get(figure.rpartition("_")[2], "") if name == figure else ""


def significant(value: float | None, digits: int = 4) -> str:
    """Write a number with `digits` significant digits.

    Returns
    -------
    str
        `MISSING` for None and NaN.
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return _write(Decimal(repr(float(value))), None, digits)


def with_spread(value: float | None, spread: float | None, digits: int = 4) -> str:
    """Write `value ± spread`, both rounded to the same decimal place.

    That place is the second significant digit of the spread, or the fifth of the larger number
    where the spread reaches beyond it. A spread that rounds to zero there is written `± 0`.

    Parameters
    ----------
    value, spread : float or None
        The spread is not negative; None or NaN: there is none, and only the value is written.
    digits : int
        Significant digits of a value whose spread is missing or rounds to zero.

    Returns
    -------
    str
        `MISSING` for a missing value.
    """
    missing = spread is None or math.isnan(spread)
    if value is None or math.isnan(value) or missing or math.isinf(value):
        return significant(value, digits)
    if math.isinf(float(spread or 0)):
        return f"{significant(value, digits)} ± ∞"
    return _write(Decimal(repr(float(value))), Decimal(repr(float(spread or 0))), digits)


def _write(value: Decimal, spread: Decimal | None, digits: int) -> str:
    if not value and not spread:
        return "0" if spread is None else "0 ± 0"
    if spread and not _round(spread, _last_place(value, spread, digits)):
        spread = Decimal(0)
    place = _last_place(value, spread, digits)
    value, rounded = _round(value, place), None if spread is None else _round(spread, place)
    largest = max(abs(value), rounded or Decimal(0))
    exponent = largest.adjusted() if largest else 0
    if exponent in _PLAIN_EXPONENTS:
        return _joined(value, rounded, max(-place, 0))
    power = f"10{str(exponent).translate(_SUPERSCRIPTS)}"
    factor = Decimal(1).scaleb(-exponent)
    scaled = _joined(
        value * factor, None if rounded is None else rounded * factor, max(exponent - place, 0)
    )
    return f"{scaled} {TIMES} {power}" if rounded is None else f"({scaled}) {TIMES} {power}"


def _last_place(value: Decimal, spread: Decimal | None, digits: int) -> int:
    """Power of ten of the last digit to write."""
    if not spread:
        return _rounded_exponent(value, digits) - digits + 1
    largest = max(abs(value), spread)
    return max(
        _rounded_exponent(spread, _SPREAD_DIGITS) - _SPREAD_DIGITS + 1,
        _rounded_exponent(largest, _MAX_DIGITS) - _MAX_DIGITS + 1,
    )


def _rounded_exponent(number: Decimal, digits: int) -> int:
    """Exponent of the first digit after rounding, so that 0.996 counts as 1.0."""
    if not number:
        return 0
    return _round(number, number.adjusted() - digits + 1).adjusted()


def _round(number: Decimal, place: int) -> Decimal:
    unit = Decimal(1).scaleb(place)
    # A float has at most 17 digits, so that whole units always fit Decimal's 28.
    return (number / unit).quantize(Decimal(1), rounding=ROUND_HALF_EVEN) * unit


def _joined(value: Decimal, spread: Decimal | None, decimals: int) -> str:
    # Adding zero turns -0 into 0.
    text = f"{value + 0:.{decimals}f}"
    if spread is None:
        return text
    return f"{text} ± {spread:.{decimals}f}" if spread else f"{text} ± 0"


def _largest(values: Iterable[float]) -> float:
    return max((abs(value) for value in values if math.isfinite(value)), default=0.0)
