"""Holm's method, against statsmodels."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from statsmodels.stats.multitest import multipletests

from batchscape.analysis.multiplicity import holm


@pytest.fixture(scope="module")
def _no_garbage() -> None:
    """Leave what other tests imported out of the collections that statsmodels asks for."""
    gc.freeze()


@pytest.mark.usefixtures("_no_garbage")
@given(arrays(float, st.integers(0, 12), elements=st.floats(0, 1)))
def test_holm_agrees_with_statsmodels(p_values):
    if len(p_values):
        expected = multipletests(p_values, method="holm")[1]
        np.testing.assert_allclose(holm(p_values), expected)
    else:
        assert len(holm(p_values)) == 0


def test_what_was_not_tested_is_not_counted():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, math.nan, 0.9]) == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)
    assert len(holm([])) == 0
