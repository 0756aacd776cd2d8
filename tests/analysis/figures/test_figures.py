"""Bars show what was measured, and geometries keep their looks in every chart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis import compare, find_cells, load
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.figures.comparison import comparison_charts
from batchscape.analysis.numbers import TIMES

pytestmark = pytest.mark.slow

FOUR = f"4{TIMES}8{TIMES}1"


def bars(sweep: Any, name: str) -> Chart:
    cells = find_cells(load(sweep.path).runs)
    (chart,) = (one for one in comparison_charts(cells, compare(cells)) if one.name == name)
    return chart


def shown(chart: Chart, kind: str) -> pd.DataFrame:
    return pd.concat([marks.table for marks in chart.marks if marks.kind == kind])


def test_bars_say_why_there_is_no_time(build):
    chart = bars(build().fork(), "step_time")
    texts = shown(chart, "text")
    assert texts[["row", "why"]].to_numpy().tolist() == [
        [FOUR, "oversubscribed: 4 ranks on 2 cores"]
    ]
    # One dot a run, for the three decompositions with times.
    assert shown(chart, "point").groupby("row").size().tolist() == [3, 3, 3]


def test_step_times_stack_up_to_the_whole(build):
    sweep = build().fork()
    runs = load(sweep.path).runs
    chart = bars(sweep, "step_time")
    table = shown(chart, "bar")
    first = table[table["row"] == f"1{TIMES}32{TIMES}1"]
    parts = ["data_s", "forward_backward_s", "exchange_s", "optimizer_s"]
    mine = runs[(runs["data_parallel_size"] == 1) & (runs["micro_batch_size"] == 32)]
    mine = mine[mine["status"] == "completed"]
    widths = first["value"] - first["value_start"]
    np.testing.assert_allclose(widths, 1000 * mine[parts].astype(float).mean())
    np.testing.assert_allclose(first["value_start"].iloc[1:], first["value"].iloc[:-1])
    assert chart.x.columns["value"].endswith("(ms)")
