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
