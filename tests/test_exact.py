from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

from exact import assert_same_rows


def frame(values: list[Any], dtype: str) -> pd.DataFrame:
    return pd.DataFrame({"x": pd.array(values, dtype=dtype)})


SAME = {
    "nullable floats": ([0.1, None, -0.0], "Float64"),
    "plain floats": ([0.1, np.nan, -0.0], "float64"),
    "half": ([0.1, 2.0], "float32"),
    "whole": ([1, None, 2**62 + 1], "Int64"),
    "truth": ([True, None, False], "boolean"),
    "texts": (["a", None, ""], "string"),
    "objects": (["a", None, 1, 0.1, [1]], "object"),
    "none": ([], "Float64"),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_tables_are_equal(name: str) -> None:
    values, dtype = SAME[name]
    assert_same_rows(
        frame(values, dtype), frame(values, dtype).set_index(pd.Index(range(7, 7 + len(values))))
    )


@pytest.mark.parametrize(
    ("values", "others", "dtype"),
    [
        ([1.0], [np.nextafter(1.0, 2)], "Float64"),
        ([1.0], [np.nextafter(1.0, 2)], "float64"),
        ([0.0], [-0.0], "Float64"),
        ([0.0], [None], "Float64"),
        ([None], [0.0], "Float64"),
        ([np.nan], [0.0], "float64"),
        ([2**62], [2**62 + 1], "Int64"),
        ([False], [None], "boolean"),
        ([""], [None], "string"),
        ([1], [True], "object"),
        ([1], [1.0], "object"),
        ([1.0, 2.0], [1.0], "Float64"),
    ],
)
def test_every_bit_counts(values: list[Any], others: list[Any], dtype: str) -> None:
    with pytest.raises(AssertionError):
        assert_same_rows(frame(values, dtype), frame(others, dtype))


def test_pandas_would_not_see_it() -> None:
    a, b = frame([1e-9], "Float64"), frame([2e-9], "Float64")
    pd.testing.assert_frame_equal(a, b, check_exact=True)
    with pytest.raises(AssertionError, match="x differs in 1 of 1 rows, first in row 0: 1e-09"):
        assert_same_rows(a, b)


def test_columns_and_types_count() -> None:
    with pytest.raises(AssertionError):
        assert_same_rows(frame([1], "Int64"), frame([1], "int64"))
    with pytest.raises(AssertionError):
        assert_same_rows(frame([1], "Int64"), frame([1], "Int64").rename(columns={"x": "y"}))


def test_files(tmp_path) -> None:
    rows = [{"step": 1, "loss": 0.1, "gone": None}, {"step": 2, "loss": float("nan")}]
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text("".join(json.dumps(row) + "\n" for row in rows))
    b.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_same_rows(a, b)
    b.write_text(a.read_text().replace("0.1", "0.10000000000000002"))
    with pytest.raises(AssertionError, match="loss differs"):
        assert_same_rows(a, b)
    for path, loss in ((tmp_path / "a.parquet", 0.1), (tmp_path / "b.parquet", 0.1)):
        frame([loss, None], "Float64").to_parquet(path)
    assert_same_rows(tmp_path / "a.parquet", tmp_path / "b.parquet")
