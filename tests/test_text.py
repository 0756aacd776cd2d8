"""Words of messages: counts, lists, durations in and out, what was meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.errors import ConfigError
from batchscape.text import (
    count_text,
    did_you_mean,
    duration_text,
    list_text,
    near_multiples,
    near_names,
    parse_duration,
    size_text,
    suggest,
)


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.25, "250 ms"),
        (2000 * 86400, "2,000 d"),
        (59, "59 s"),
        (60, "1 min"),
        (3599, "60 min"),
        (5400, "1.5 h"),
        (86400, "1 d"),
        (0.9996, "1,000 ms"),
        (float("inf"), "∞"),
    ],
)
def test_a_duration_is_written_in_the_unit_that_fits(seconds, text):
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1000, "1,000 bytes"),
        (1536, "1.5 KiB"),
        (999.6 * 1024, "1,000 KiB"),
        (1023.6 * 2**20, "1,024 MiB"),
        (2**30, "1 GiB"),
        (1234 * 2**30, "1,234 GiB"),
    ],
)
def test_a_size_is_written_in_the_unit_that_fits(size, text):
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (count_text(1, "run"), "1 run"),
        (count_text(0, "run"), "0 runs"),
        (count_text(3, "run has", "runs have"), "3 runs have"),
        (count_text(1, "run has", "runs have"), "1 run has"),
        (list_text([]), ""),
        (list_text([8]), "8"),
        (list_text("ab"), "a or b"),
        (list_text("abc", "and"), "a, b and c"),
        (list_text("abcde", "or", 3), "a, b, c and 2 more"),
        (list_text("abc", "or", 3), "a, b or c"),
        (list_text("abc", "", 3), "a, b, c"),
        (list_text("abcd", "", 3), "a, b, c and 1 more"),
        (near_multiples(100, 32), "96 or 128"),
        (near_multiples(5, 32), "32"),
    ],
)
def test_counts_and_lists_are_written_as_people_do(text, expected):
    assert text == expected


def test_a_name_that_is_not_known_is_answered_with_those_that_are_near():
    names = ["micro_batch_size", "global_batch_size", "seed"]
    assert near_names("sede", names) == ["seed"]
    assert near_names("sede", names, share=0.95) == []
    assert near_names("batch_size", names, most=2) == ["micro_batch_size", "global_batch_size"]
    assert did_you_mean(names) == "; did you mean micro_batch_size, global_batch_size or seed?"
    assert suggest("sede", names[1:]) == "; did you mean seed? Known here: global_batch_size, seed"
    assert suggest("xyz", ["seed"]) == ". Known here: seed"
    assert suggest("xyz", []) == "."
