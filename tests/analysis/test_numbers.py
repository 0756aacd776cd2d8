from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.analysis.numbers import (
    MISSING,
    TIMES,
    memory_scale,
    significant,
    time_scale,
    with_spread,
)

PLAIN = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
finite = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e200, max_value=1e200)
spreads = st.floats(min_value=1e-200, max_value=1e200)


def parse(text: str) -> tuple[list[str], int]:
    """Return the numbers as written, and the power of ten that multiplies all of them."""
    power = 0
    if TIMES in text:
        text, _, factor = text.rpartition(f" {TIMES} 10")
        power = int(factor.translate(PLAIN))
    return text.strip("()").split(" ± "), power


def place_of(written: str, power: int) -> int:
    """Power of ten of the last digit written; zeros of a whole number may be rounded ones."""
    return power - len(written.partition(".")[2])


@pytest.mark.parametrize(
    ("value", "spread", "expected"),
    [
        (1.23456, 0.0123, "1.235 ± 0.012"),
        (12345.6, 234.5, "12350 ± 230"),
        (12345.6, 99.6, "12350 ± 100"),
        (9.996, 0.0996, "10.00 ± 0.10"),
        (0.001, 12.0, "0 ± 12"),
        (-0.0001, 1.0, "0.0 ± 1.0"),
        (5.2134, 0.0, "5.213 ± 0"),
        (5.2134, 1e-17, "5.213 ± 0"),
        (0.37758, 5.5e-6, "0.37758 ± 0.00001"),
        (5.2134, None, "5.213"),
        (5.2134, math.nan, "5.213"),
        (0.0, 0.0, "0 ± 0"),
        (3.3e-7, 2e-8, f"(3.30 ± 0.20) {TIMES} 10⁻⁷"),
        (None, 1.0, MISSING),
        (math.nan, 1.0, MISSING),
        (math.inf, 1.0, "∞"),
        (1.0, math.inf, "1.000 ± ∞"),
    ],
)
def test_known_texts(value, spread, expected):
    assert with_spread(value, spread) == expected


@given(finite, spreads)
def test_value_and_spread_are_both_within_half_of_the_last_place(value, spread):
    written, power = parse(with_spread(value, spread))
    assert len(written) == 2
    numbers = [Decimal(number).scaleb(power) for number in written]
    if numbers[1] == 0:
        # A spread that vanishes at five digits leaves a value of four.
        assert Decimal(repr(spread)) <= Decimal(repr(abs(value))) * Decimal("1e-4")
        assert abs(numbers[0] - Decimal(repr(value))) <= Decimal(repr(abs(value))) * Decimal(
            "0.5001e-3"
        )
        return
    # The place is the second digit of the spread, or the fifth of the larger number.
    larger = max(abs(Decimal(repr(value))), Decimal(repr(spread)))
    half = max(Decimal(repr(spread)) * Decimal("0.05"), larger * Decimal("0.5e-4"))
    assert abs(numbers[0] - Decimal(repr(value))) <= half * Decimal("1.001")
    assert abs(numbers[1] - Decimal(repr(spread))) <= half * Decimal("1.001")
    assert place_of(written[0], power) == place_of(written[1], power)


@given(finite, spreads)
def test_never_more_than_seven_digits_and_never_a_negative_zero(value, spread):
    text = with_spread(value, spread)
    for number in parse(text)[0]:
        assert len(number.strip("-").replace(".", "").lstrip("0")) <= 7
        assert not (number.startswith("-") and float(number) == 0)


@given(finite, st.integers(min_value=1, max_value=9))
def test_significant_digits_round_trip(value, digits):
    written, power = parse(significant(value, digits))
    error = abs(Decimal(written[0]).scaleb(power) - Decimal(repr(value)))
    assert error <= Decimal(repr(abs(value))) * Decimal(10) ** (1 - digits) * Decimal("0.5000001")


def test_one_unit_serves_a_whole_column():
    assert memory_scale([0.01, math.nan, 0.9]).unit == "MiB"
    assert memory_scale([0.01, 1.0]).unit == "GiB"
    assert memory_scale([]).factor == 1024
    assert time_scale([0.01, 9.9]).unit == "ms"
    assert time_scale([10.0]).unit == "s"
