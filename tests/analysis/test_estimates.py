"""One rule for what is shown below three seeds: a value and its n, and no interval."""

import math

import pandas as pd
import pytest

from batchscape.analysis import compare, find_cells, load
from batchscape.analysis.comparing.pairs import Contrast
from batchscape.analysis.estimates import Estimate, interval_text
from batchscape.analysis.report.macros import macros
from batchscape.analysis.report.tables import comparison_table


def estimate(n, value=0.223, low=0.0, high=42235825.0):
    return Estimate(value, low, high, n, "samples", "t", "what it is")


@pytest.mark.parametrize("n", [1, 2])
def test_below_three_units_a_value_stands_alone(n):
    assert estimate(n).text() == f"0.223 (n = {n})"
    assert interval_text(2.0, -12.0, 16.0, n) == f"2.00 (n = {n})"
    lines = macros({"critical_batch_size": estimate(n)})
    assert "42" not in lines
    assert r"\newcommand{\bsCriticalBatchSizeHigh}{\mbox{" in lines
    # What bounds a quantity without a value is no interval about one.
    assert estimate(n, value=math.nan, low=80.0).text() == "not identified (≥ 80.0)"


def test_from_three_units_on_the_interval_is_shown():
    assert estimate(3, 120.0, 95.0, 160.0).text() == "120 [95.0, 160]"
    assert interval_text(120.0, 95.0, math.inf, 3) == "120 [95.0, ∞]"
    assert interval_text(5.0, -1.0, math.inf, 3) == "5.00 [-1.00, ∞]"
    assert interval_text(5.0, -math.inf, math.inf, 3) == "5.00 [-∞, ∞]"
    assert interval_text(9.1e-17, -0.14, 0.14, 3) == "0 [-0.140, 0.140]"
    assert interval_text(9.1e-17, 8e-17, 1e-16, 3).startswith("9.10 ")
    assert interval_text(math.nan, 1.0, 2.0, 3) == "—"


@pytest.mark.parametrize(("seeds", "has_interval"), [(2, False), (3, True)])
def test_tables_follow_the_rule(build, seeds, has_interval):
    sweep = build()
    for seed in range(seeds):
        sweep.run((1, 32, 1), seed=seed)
    cells = find_cells(load(sweep.path).runs)
    comparison = compare(cells)
    assert comparison["final_loss_n"].eq(seeds).all()
    assert comparison["final_loss_ci95"].notna().all() == has_interval
    text = " ".join(" ".join(row) for row in comparison_table(comparison, cells).texts.rows)
    assert ("±" in text) == has_interval


def test_claims_follow_the_rule():
    pairs = pd.Series([0.1, 0.3, 0.2]).to_numpy()
    two, three = (Contrast("a against b", pairs[:n], ()) for n in (2, 3))
    assert two.text("difference") == "difference 0.2000 (n = 2) for a against b"
    assert three.text("difference").startswith("difference 0.2000 [-0.0")
