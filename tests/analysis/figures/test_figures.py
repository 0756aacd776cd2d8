"""Bars show what was measured."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis import compare, find_cells, load
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.figures.comparison import comparison_charts
from batchscape.analysis.numbers import TIMES

pytestmark = pytest.mark.slow


def bars(sweep, name):
    cells = find_cells(load(sweep.path).runs)
    (chart,) = (one for one in comparison_charts(cells, compare(cells)) if one.name == name)
    return chart


def shown(chart: Chart, kind: str) -> pd.DataFrame:
    return pd.concat([marks.table for marks in chart.marks if marks.kind == kind])


def test_step_times_stack_up_to_the_whole(build):
    """And a bar without a time says why."""
    runs = load(build().fork().path).runs
    cells = find_cells(runs)
    (chart,) = (one for one in comparison_charts(cells, compare(cells)) if one.name == "step_time")
    texts = shown(chart, "text")
    why = "oversubscribed: 4 ranks on 2 cores"
    assert texts[["row", "why"]].to_numpy().tolist() == [[f"4{TIMES}8{TIMES}1", why]]
    # One dot a run, for the three decompositions with times.
    assert shown(chart, "point").groupby("row").size().tolist() == [3, 3, 3]
    table = shown(chart, "bar")
    first = table[table["row"] == f"1{TIMES}32{TIMES}1"]
    parts = ["data_s", "forward_backward_s", "exchange_s", "optimizer_s"]
    mine = runs[runs["micro_batch_size"].eq(32) & runs["status"].eq("completed")]
    widths = first["value"] - first["value_start"]
    np.testing.assert_allclose(widths, 1000 * mine[parts].astype(float).mean())
    np.testing.assert_allclose(first["value_start"].iloc[1:], first["value"].iloc[:-1])


def test_times_after_other_warmups_are_other_bars(build):
    sweep = build()
    for repeat, steps in enumerate((0, 5)):
        sweep.run((1, 8, 1), measure__warmup_optimizer_steps=steps, timing_repeat=repeat)
    assert shown(bars(sweep, "step_time"), "bar")["row"].nunique() == 2
