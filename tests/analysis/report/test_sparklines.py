"""Curves in a terminal: heights against a plain recomputation, and which cells stand for others."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchscape.analysis import find_cells, load
from batchscape.analysis.report.sparklines import curve_lines, sparkline

BARS = "▁▂▃▄▅▆▇█"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_heights_are_in_the_order_of_the_values(values: list[float]) -> None:
    drawn = sparkline(np.array(values), min(values), max(values))
    heights = [BARS.index(bar) for bar in drawn]
    assert len(heights) == len(values)
    for (one, low), (other, high) in zip(
        zip(values, heights, strict=True), zip(values[1:], heights[1:], strict=True), strict=False
    ):
        assert low <= high if one <= other else low >= high
    if max(values) > min(values):
        assert (heights[values.index(min(values))], heights[values.index(max(values))]) == (0, 7)


def test_eight_even_steps() -> None:
    assert sparkline(np.arange(8.0), 0.0, 7.0) == BARS
    assert sparkline(np.array([2.0, 2.0]), 2.0, 2.0) == "▁▁"


def test_the_best_rate_stands_for_its_global_batch(build: Any) -> None:
    sweep = build()
    ends = {}
    for batch, rates in ((8, (0.001, 0.002)), (32, (0.001,))):
        for rate in rates:
            for seed in (0, 1):
                sweep.run((1, batch, 1), seed=seed, optimizer__learning_rate=rate)
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    evals = tables.evals.merge(cells.runs[["run_id", "cell"]], on="run_id")
    last = evals.sort_values("samples").groupby(["cell", "run_id"])["eval_loss"].last()
    ends = last.groupby("cell").mean()
    batch = cells.table.loc[ends.index, "global_batch_size"]
    best = ends.groupby(batch).idxmin()
    heading, *lines = curve_lines(cells, tables.evals)
    assert heading.endswith("of each global batch the lowest at the end")
    assert len(lines) == 2
    for line, cell in zip(lines, best, strict=True):
        assert f" to {ends[cell]:.3g}" in line
        assert f"B = {batch[cell]}, " in line


def test_without_evaluations_there_are_no_lines(build: Any) -> None:
    sweep = build()
    sweep.run((1, 8, 1))
    tables = load(sweep.path)
    assert list(curve_lines(find_cells(tables.runs), tables.evals.iloc[:0])) == []
