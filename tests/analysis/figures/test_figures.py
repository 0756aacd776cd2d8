"""Bars show what was measured, and geometries keep their looks in every chart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis import compare, find_cells, load
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.figures.comparison import MAX_BARS, comparison_charts
from batchscape.analysis.figures.style import looks
from batchscape.analysis.numbers import TIMES

pytestmark = pytest.mark.slow

FOUR = f"4{TIMES}8{TIMES}1"
VIRIDIS = ("#440154", "#25838e", "#b0dd2f")
"""Of matplotlib's map, at 0, 0.44 and 0.88."""


def bars(sweep: Any, name: str) -> Chart:
    cells = find_cells(load(sweep.path).runs)
    (chart,) = (one for one in comparison_charts(cells, compare(cells)) if one.name == name)
    return chart


def shown(chart: Chart, kind: str) -> pd.DataFrame:
    return pd.concat([marks.table for marks in chart.marks if marks.kind == kind])


def channels(colour: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(colour[1:]), np.uint8).astype(int)


def test_more_geometries_than_colours_all_differ(build: Any) -> None:
    sweep = build()
    for micro in range(1, 13):
        sweep.run((1, micro, 1), optimizer_steps=2)
    look = looks(find_cells(load(sweep.path).runs))
    assert len({item.colour for item in look.values()}) == 12


def test_colours_are_those_of_the_global_batches_in_their_order(build: Any) -> None:
    sweep = build()
    for micro, accumulation, rate in ((32, 1, 0.001), (8, 1, 0.002), (8, 4, 0.002), (16, 1, 0.003)):
        settings = {"optimizer__learning_rate": rate}
        sweep.run((1, micro, accumulation), optimizer_steps=2, **settings)
    look = looks(find_cells(load(sweep.path).runs))
    batches = (8, 16, 32)
    assert [text.split(TIMES)[1] for text in look] == ["8", "16", "32", "8"]
    batch_colours = [look[f"1{TIMES}{batch}{TIMES}1"].colour for batch in batches]
    for colour, expected in zip(batch_colours, VIRIDIS, strict=True):
        assert np.abs(channels(colour) - channels(expected)).max() <= 2
    # Another cut of the largest batch is a paler shade.
    paler = channels(look[f"1{TIMES}8{TIMES}4"].colour)
    np.testing.assert_allclose(paler, 255 - 0.4 * (255 - channels(batch_colours[2])), atol=1)


def test_bars_say_why_there_is_no_time(build: Any) -> None:
    chart = bars(build().fork(), "step_time")
    texts = shown(chart, "text")
    assert texts[["row", "why"]].to_numpy().tolist() == [
        [FOUR, "oversubscribed: 4 ranks on 2 cores"]
    ]
    # One dot a run, for the three decompositions with times.
    assert shown(chart, "point").groupby("row").size().tolist() == [3, 3, 3]


def test_step_times_stack_up_to_the_whole(build: Any) -> None:
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


def test_memory_bars_are_means_in_a_unit_that_fits(build: Any) -> None:
    chart = bars(build().fork(seeds=(0, 1)), "memory")
    assert chart.x.columns == {"value": "allocated memory (MiB)"}
    table = shown(chart, "bar")
    assert len(table) == 4 * 4
    assert table["value"].max() == pytest.approx(89.29, abs=0.01)


def test_many_cells_are_cut(build: Any) -> None:
    sweep = build()
    for rate in range(MAX_BARS + 3):
        sweep.run(optimizer_steps=6, loader__workers=1 + rate)
    assert shown(bars(sweep, "step_time"), "bar")["row"].nunique() == MAX_BARS


def test_cells_that_cost_the_same_by_their_settings_are_one_bar(build: Any) -> None:
    sweep = build()
    for rate in (0.001, 0.002):
        for seed in (0, 1):
            sweep.run((1, 8, 1), seed=seed, optimizer__learning_rate=rate)
            sweep.run((1, 8, 2), seed=seed, optimizer__learning_rate=rate)
    cells = find_cells(load(sweep.path).runs)
    chart = bars(sweep, "memory")
    table = shown(chart, "bar").drop_duplicates("row")
    assert table["row"].tolist() == [f"1{TIMES}8{TIMES}{n}" for n in (1, 2)]
    for accumulation, runs in zip((1, 2), table["run"], strict=True):
        accumulations = cells.runs.iloc[runs]["gradient_accumulation_steps"]
        assert accumulations.tolist() == [accumulation] * 4


def test_times_after_other_warmups_are_other_bars(build: Any) -> None:
    sweep = build()
    for repeat, steps in enumerate((0, 5)):
        sweep.run((1, 8, 1), measure__warmup_optimizer_steps=steps, timing_repeat=repeat)
    assert shown(bars(sweep, "step_time"), "bar")["row"].nunique() == 2
