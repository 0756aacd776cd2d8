"""Durations in and out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.analysis.decisions.duration import parse_duration
from batchscape.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("2h", 7200), ("1h30m", 5400), ("1.5h", 5400), ("3d", 259200)],
)
def test_a_duration_is_read(text, seconds):
    assert parse_duration(text) == seconds


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from("dhms")), min_size=1, max_size=3))
def test_parts_add_up(parts):
    size = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    total = sum(number * size[unit] for number, unit in parts)
    text = "".join(f"{number}{unit}" for number, unit in parts)
    if total:
        assert parse_duration(text) == total
    else:
        with pytest.raises(ConfigError, match="1h30m"):
            parse_duration(text)


@pytest.mark.parametrize("text", ["", "0s", "-3m", "10", "h", "1h 30m", "1w", "9" * 400 + "s"])
def test_near_misses_are_refused(text):
    with pytest.raises(ConfigError):
        parse_duration(text)
