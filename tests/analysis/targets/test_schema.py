"""Tables that come in: one rule a name, and whatever breaks it is refused with value and row."""

from __future__ import annotations

import math

import pandas as pd
import pyarrow as pa
import pytest

from batchscape.analysis import fit_tradeoff, reaches_table, steps_to_target
from batchscape.analysis.targets.schema import check
from batchscape.errors import AnalysisError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "good", "bad", "rule"),
    [
        ("global_batch_size", 8, [2.5, 0, -8, NAN, INF, 2**53 + 2, "8k"], "a positive whole numb"),
        ("micro_batch_size", 1, [1.5, 0, NAN, INF, "one"], "a whole number of at least 1"),
        ("learning_rate", 0.1, [0, -0.1, NAN, INF, "0,1"], "a finite number above 0 in every row"),
        ("optimizer_step", 0, [-1, NAN, INF, "end"], "a finite number in every row, which counts"),
        ("tokens", NAN, [-1, INF, "1k"], "a finite number, 0 or above; missing where there is"),
        ("peak_allocated_gib", NAN, [-1, INF, "2 GiB"], "a finite number, 0 or above; missing"),
        ("step_time_s", NAN, [0, INF, "1 s"], "a finite number above 0; missing where"),
        ("steps_to_target", INF, [0, -5, -INF, 1e16, "ten"], "a number above 0 (a target is "),
        ("target_loss", -1, [NAN, INF, -INF, "low"], "a finite number in every row"),
        ("loss", -INF, ["low"], "a number, or missing"),
        ("final_eval_loss", NAN, ["low"], "a number, or missing"),
        ("seed", "a", [NAN, None], "there in every row"),
        ("outcome", "pruned", ["lost", None], "one of reached, censored, pruned, diverged"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_the_value_and_its_row(name, good, bad, rule):
    for value in bad:
        table = pd.DataFrame({name: [good, value, good]}, index=[5, 5, 5], dtype=object)
        with pytest.raises(AnalysisError) as refused:
            check(table, "a table", [name])
        text = str(refused.value)
        assert text.startswith(f"{name} is {rule}")
        assert text.endswith(f"; 1 of 3 rows have another value, such as {str(value)!r} in row 2")


@pytest.mark.parametrize("missing", [None, "", "NA", "nan", "-NaN", " null "])
def test_texts_that_are_numbers_or_none_are_read(missing):
    table = pd.DataFrame({"loss": [" 1e3", missing, "-inf"], "global_batch_size": ["8", 16.0, 32]})
    checked = check(table, "a table", ["loss"], ["global_batch_size", "seed"])
    assert checked["loss"].fillna(0).tolist() == [1000, 0, -INF]
    assert checked["global_batch_size"].dtype == "int64"
    assert checked["global_batch_size"].tolist() == [8, 16, 32]


@pytest.mark.parametrize("dtype", ["Float64", pd.ArrowDtype(pa.float64()), "float32"])
def test_numbers_of_any_type_are_read(dtype):
    checked = check(pd.DataFrame({"loss": pd.Series([1, None], dtype=dtype)}), "a table", ["loss"])
    assert checked["loss"].dtype == "float64"
    assert checked["loss"].fillna(0).tolist() == [1, 0]


def test_a_table_that_is_none_is_refused():
    table = pd.DataFrame({"a": [1], "loss": [2.0]})
    with pytest.raises(AnalysisError, match=r"^curves needs the columns run, b; it has: a, loss$"):
        check(table, "curves", ["run", "loss", "b"])
    with pytest.raises(AnalysisError, match="it has: none"):
        check(pd.DataFrame(), "curves", ["run"])
    with pytest.raises(AnalysisError, match=r"^curves needs rows; it is empty$"):
        check(table.iloc[:0], "curves", ["loss"])
    with pytest.raises(AnalysisError, match=r"more than one is called a$"):
        check(table.set_axis(["a", "a"], axis=1), "curves", ["a"])


@pytest.mark.parametrize(
    ("read", "changed", "words"),
    [
        (steps_to_target, {"tokens": "many"}, "tokens is a finite number"),
        (reaches_table, {"samples_to_target": "many"}, "samples_to_target is a number above 0"),
        (reaches_table, {"outcome": "lost"}, "outcome is one of reached"),
        (fit_tradeoff, {"outcome": "lost"}, "outcome is one of reached"),
        (reaches_table, {"steps_to_target": [True] * 3}, "steps_to_target is a number above 0"),
        (reaches_table, {"steps_to_target": [1j] * 3}, "steps_to_target is a number above 0"),
    ],
)
def test_columns_that_a_table_may_lack_are_checked_where_they_are_there(read, changed, words):
    rows = {"run": range(3), "loss": [3.0, 2.0, 1.0], "optimizer_step": [1, 2, 3]}
    table = pd.DataFrame({**rows, "global_batch_size": 8, "seed": range(3), "steps_to_target": 9})
    with pytest.raises(AnalysisError, match=words):
        read(table.assign(**changed))
