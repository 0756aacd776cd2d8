"""Rows of some runs."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.analysis.joins import rows_of


@st.composite
def tables(draw):
    """Runs of two sweeps, some without rows, and rows of further runs; texts or categories."""
    identities = st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"))
    with_rows = draw(st.lists(identities, unique=True, max_size=6))
    lengths = draw(st.lists(st.integers(0, 4), min_size=len(with_rows), max_size=len(with_rows)))
    rows = pd.DataFrame(
        [(*run, k) for run, n in zip(with_rows, lengths, strict=True) for k in range(n)],
        columns=["sweep_dir", "run_id", "optimizer_step"],
    ).astype({"optimizer_step": "Int64"})
    rows["loss"] = pd.array(
        draw(st.lists(st.none() | st.floats(0, 1), min_size=len(rows), max_size=len(rows))),
        dtype="Float64",
    )
    if draw(st.booleans()):
        rows = rows.astype({"sweep_dir": "category", "run_id": "category"})
    chosen = draw(st.lists(identities, unique=True, max_size=6))
    runs = pd.DataFrame(chosen, columns=["sweep_dir", "run_id"], dtype=str)
    runs["cell"] = draw(st.lists(st.integers(0, 2), min_size=len(runs), max_size=len(runs)))
    return runs, rows


@pytest.mark.slow
@given(tables())
def test_rows_are_those_that_a_merge_finds(given_tables):
    runs, rows = given_tables
    keys = ["sweep_dir", "run_id"]
    texts = rows.astype(dict.fromkeys(keys, object))
    numbered = runs[keys].astype(object).assign(run=np.arange(len(runs)))
    merged = texts.merge(numbered, on=keys)[["run", "optimizer_step", "loss"]]
    expected = merged.astype({"run": "int64", "optimizer_step": float, "loss": float})
    selected = rows_of(runs, rows, ["optimizer_step", "loss"])
    order = ["run", "optimizer_step"]
    pd.testing.assert_frame_equal(
        selected.sort_values(order, ignore_index=True),
        expected.sort_values(order, ignore_index=True),
    )
    run_of_rows = texts.merge(numbered, on=keys, how="left")["run"].dropna()
    assert selected["run"].tolist() == run_of_rows.tolist()
