"""Curves in a terminal: heights against a plain recomputation, and which cells stand for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
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
    for batch, rates in ((8, (0.001, 0.002)), (32, (0.0005,))):
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
    # In the order of the global batches, whatever their rates.
    for line, cell in zip(lines, best, strict=True):
        assert f" to {ends[cell]:.3g}" in line
        assert f"B = {batch[cell]}, " in line


def test_without_evaluations_there_are_no_lines(build: Any) -> None:
    sweep = build()
    sweep.run((1, 8, 1))
    tables = load(sweep.path)
    assert list(curve_lines(find_cells(tables.runs), tables.evals.iloc[:0])) == []


def test_the_ends_of_a_line_are_the_first_and_the_last_evaluation(build: Any) -> None:
    """With more evaluations than places, and as many places for equal samples."""
    sweep = build()
    for batch, steps in ((8, 64), (16, 32), (64, 8)):
        sweep.run((1, batch, 1), optimizer_steps=steps, held_out=lambda when: 9.0 - 0 * when)
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    parts = []
    for key, own in tables.evals.groupby(["sweep_dir", "run_id"], observed=True):
        whole = 512 // int(own["samples"].max() // own["optimizer_step"].max())
        when = np.arange(whole + 1)
        loss = np.where(when == whole, 2.0, np.where(when == 0, 8.0, 5.0))
        parts.append(
            pd.DataFrame({"samples": when * (512 // whole), "eval_loss": loss}).assign(
                sweep_dir=key[0], run_id=key[1]
            )
        )
    _, *lines = curve_lines(cells, pd.concat(parts, ignore_index=True))
    assert len(lines) == 3
    for line in lines:
        bars = line[2:26]
        assert (bars[0], bars[-1]) == ("█", "▁")
        assert set(bars) <= set(BARS)
        assert line[26:].split()[:3] == ["8.00", "to", "2.00"]


def test_survivors_of_a_rate_that_diverged_do_not_stand_for_a_batch(build: Any) -> None:
    sweep = build()
    good, bad = (lambda when: 3.0 + 0 * when), (lambda when: 2.0 + 0 * when)
    for seed in (0, 1):
        sweep.run((1, 8, 1), seed=seed, held_out=good, optimizer__learning_rate=0.001)
    for batch in (8, 16):
        sweep.run((1, batch, 1), seed=0, held_out=bad, optimizer__learning_rate=0.004)
        sweep.run(
            (1, batch, 1), seed=1, status="diverged", reason="NaN", optimizer__learning_rate=0.004
        )
    tables = load(sweep.path)
    heading, whole, survivors = curve_lines(find_cells(tables.runs), tables.evals)
    assert heading.endswith("(first among cells whose runs all completed)")
    assert "3.00 to 3.00" in whole
    assert "runs" not in whole
    assert "2.00 to 2.00" in survivors
    assert survivors.endswith(", 1 of 2 runs")


def test_lines_of_joined_sweeps_are_told_apart_by_their_names(build: Any) -> None:
    one, two = build("one", "first"), build("two", "second")
    one.run((1, 8, 1))
    two.run((1, 8, 1), device_type="cuda", hardware="Accelerator of a long name")
    tables = load(one.path, two.path)
    _, *lines = curve_lines(find_cells(tables.runs), tables.evals)
    assert all("B = 8, " in line for line in lines)
    assert sorted(line.rpartition(", ")[2] for line in lines) == ["first", "second"]
    assert not any("Accelerator" in line for line in lines)


def test_a_batch_that_nothing_completed_is_named(build: Any) -> None:
    sweep = build()
    sweep.run((1, 8, 1))
    sweep.run((1, 32, 1), evaluated=False)
    for seed, status in enumerate(("diverged", "diverged", "oom")):
        sweep.run((1, 64, 1), seed=seed, status=status, reason="", stop_reason=None, done=5)
    sweep.run((1, 128, 1), status="pending")
    tables = load(sweep.path)
    _, curve, *none = curve_lines(find_cells(tables.runs), tables.evals)
    assert "B = 8, " in curve
    assert [line.split(maxsplit=1) for line in none] == [
        ["none", "B = 32: no completed run was evaluated (1 completed)"],
        ["none", "B = 64: no completed run was evaluated (2 diverged, 1 oom)"],
    ]
    assert {line.index("B =") for line in none} == {curve.index("B =")}
