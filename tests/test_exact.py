import json

import numpy as np
import pandas as pd
import pytest

from exact import assert_same_rows


def frame(values, dtype):
    return pd.DataFrame({"x": pd.array(values, dtype=dtype)})


@pytest.mark.parametrize(
    ("values", "others", "dtype"),
    [
        ([1.0], [np.nextafter(1.0, 2)], "Float64"),
        ([0.0], [-0.0], "Float64"),
        ([0.0], [None], "Float64"),
        ([np.nan], [0.0], "float64"),
        ([2**62], [2**62 + 1], "Int64"),
        ([""], [None], "string"),
        ([1], [True], "object"),
        ([1.0, 2.0], [1.0], "Float64"),
    ],
)
def test_every_bit_counts(values, others, dtype):
    with pytest.raises(AssertionError):
        assert_same_rows(frame(values, dtype), frame(others, dtype))


def test_pandas_would_not_see_it():
    a, b = frame([1e-9], "Float64"), frame([2e-9], "Float64")
    pd.testing.assert_frame_equal(a, b, check_exact=True)
    with pytest.raises(AssertionError, match="x differs in 1 of 1 rows, first in row 0: 1e-09"):
        assert_same_rows(a, b)


def test_columns_types_and_files_count(tmp_path):
    a = frame([1], "Int64")
    for b in (frame([1], "int64"), a.rename(columns={"x": "y"})):
        with pytest.raises(AssertionError):
            assert_same_rows(a, b)
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text(json.dumps({"loss": 0.1, "gone": None}) + "\n")
    assert_same_rows(one, one)
    two.write_text(one.read_text().replace("0.1", "0.10000000000000002"))
    with pytest.raises(AssertionError, match="loss differs"):
        assert_same_rows(one, two)
