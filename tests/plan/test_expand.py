import copy
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.errors import ConfigError
from batchscape.plan.expand import SweptSetting, expand, set_values

SETTINGS = {"a": {"x": 1, "y": {"z": 2}}, "b": {"x": 3}, "c": 4}
KEYS = ["a.x", "a.y.z", "b.x", "c"]


@given(st.dictionaries(st.sampled_from(KEYS), st.integers() | st.none() | st.lists(st.integers())))
def test_set_values_sets_those_and_nothing_else(values):
    before = copy.deepcopy(SETTINGS)
    changed = set_values(SETTINGS, values)
    assert before == SETTINGS
    expected = json.loads(json.dumps(SETTINGS))
    for key, value in values.items():
        *parents, last = key.split(".")
        node = expected
        for parent in parents:
            node = node[parent]
        node[last] = value
    assert changed == expected


@pytest.mark.parametrize("key", ["a.w", "d", "c.x", "a.x.y", "a.y.z.w", "d.e.f"])
def test_set_values_refuses_unknown_keys(key):
    with pytest.raises(ConfigError, match=f"{key} is no setting"):
        set_values(SETTINGS, {key: 1})


def test_expand_is_the_product_and_composes_once_per_choice():
    composed = []

    def compose(lines):
        composed.append(lines)
        return lambda values: {"lines": list(lines), **values}

    axes = [
        SweptSetting("seed", (0, 1, 2)),
        SweptSetting("model", ("small", "large"), ("model=small", "model=large")),
        SweptSetting("rate", (0.1, 0.2)),
        SweptSetting("data", ("text",), ("data=text",)),
    ]
    cells = expand(axes, compose)
    expected = list(itertools.product(*(axis.values for axis in axes)))
    assert [tuple(cell.value_of_axis.values()) for cell in cells] == expected
    for cell, (seed, model, rate, data) in zip(cells, expected, strict=True):
        assert cell.settings == {
            "lines": [f"model={model}", f"data={data}"],
            "seed": seed,
            "rate": rate,
        }
    assert composed == [("model=small", "data=text"), ("model=large", "data=text")]


def test_no_axis_is_one_cell():
    (cell,) = expand([], lambda lines: lambda values: {"lines": lines, **values})
    assert cell.settings == {"lines": ()}
    assert cell.value_of_axis == {}
