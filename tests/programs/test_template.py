"""Laws of templates: a value is put in as it is, whatever it looks like."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchscape.config.template import fill, placeholders, to_text
from batchscape.errors import ConfigError

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}(\.[a-z0-9_]{1,5})?", fullmatch=True)
PARTS = st.lists(
    st.one_of(st.text().map(lambda text: ("text", text)), st.tuples(st.just("name"), NAMES))
)


@settings(max_examples=30)
@given(PARTS, st.data())
def test_a_template_is_its_texts_with_values_between(parts, data):
    """The oracle puts the parts together by hand; braces of a text are doubled."""
    values = {name: data.draw(st.text()) for kind, name in parts if kind == "name"}
    template = "".join(
        f"{{{part}}}" if kind == "name" else part.replace("{", "{{").replace("}", "}}")
        for kind, part in parts
    )
    assert placeholders(template) == [part for kind, part in parts if kind == "name"]
    expected = "".join(values[part] if kind == "name" else part for kind, part in parts)
    assert fill(template, values) == expected


@given(st.text())
def test_a_value_is_never_looked_at_again(value):
    """No value can name a placeholder, end an argument, or reach a shell."""
    assert fill("--x={a}", {"a": value, "b": "secret"}) == f"--x={value}"
    assert fill("{a}", {"a": "{b} {{ ; rm -rf / $(b)"}) == "{b} {{ ; rm -rf / $(b)"


@given(st.text())
def test_any_text_is_a_template_or_a_config_error(text):
    try:
        names = placeholders(text)
    except ConfigError as error:
        assert "doubled" in str(error)  # noqa: PT017  (either outcome is right)
    else:
        fill(text, dict.fromkeys(names, ""))


@pytest.mark.parametrize(
    "text", ["{", "}", "{}", "{a", "a}", "{a b}", "{0}", "{a!r}", "{a:3}", "{a.}"]
)
def test_what_is_no_placeholder_is_refused(text):
    with pytest.raises(ConfigError, match="no placeholder"):
        placeholders(text)


@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans()))
def test_a_program_reads_the_number_that_was_meant(value):
    assert json.loads(to_text(value)) == value
