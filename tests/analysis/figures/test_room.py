"""Which cells the loss curves open with, and what their caption says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
import vl_convert

from batchscape.analysis import compare, find_cells, load
from batchscape.analysis.cells import Cells
from batchscape.analysis.figures.chart import Axis, Chart, Marks
from batchscape.analysis.figures.loss import loss_chart
from batchscape.analysis.figures.settings import setting_names
from batchscape.analysis.figures.style import looks
from batchscape.analysis.figures.vega import paper_caption, paper_chart
from batchscape.analysis.numbers import TIMES
from batchscape.analysis.report.topics import Material, find_sections

SEARCHED = {8: (0.001, 0.0015, 0.00225), 16: (0.0011, 0.0016, 0.0024), 32: (0.003, 0.004, 0.006)}
BEST = {8: 0.0015, 16: 0.0011, 32: 0.006, 64: 0.01}
BEST_PAIRS = {(batch, BEST[batch]) for batch in SEARCHED}


def ending_at(loss: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda when: loss + 3 * 0.9**when


def sweep_of(
    build: Any,
    rates: Mapping[int, Sequence[float]],
    but: Mapping[tuple[int, float], Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Any:
    """Write runs whose held-out loss is lowest, all along, at the rate that `BEST` names.

    `but` has settings of their own for the runs of some pairs of global batch and rate.
    """
    sweep = build()
    for batch, batch_rates in rates.items():
        for rate in batch_rates:
            loss = 2.0 + abs(np.log(rate / BEST[batch]))
            for seed in (0, 1):
                curves = {"loss": ending_at(loss), "held_out": ending_at(loss)}
                options = {"optimizer__learning_rate": rate, **settings}
                options |= (but or {}).get((batch, rate), {})
                sweep.run((1, batch, 1), seed=seed, **curves, **options)
    return sweep


LOST = {(16, rate): {"status": "diverged"} for rate in SEARCHED[16]}


def test_a_scaled_rate_is_the_one_that_was_trained_with(build):
    """The rule doubles rates at B = 32. The runs of seed 1 have none, as rejected ones."""
    rates = (0.001, 0.002)
    runs = load(sweep_of(build, {8: rates, 32: rates}).path).runs
    factor = runs["global_batch_size"].map({8: 1.0, 32: 2.0})
    scaled = runs["optimizer.learning_rate"].astype(float) * factor
    cells = find_cells(runs.assign(learning_rate=scaled.mask(runs["seed"].eq(1))))
    assert cells.table["optimizer.learning_rate"].tolist() == ["0.001", "0.001", "0.002", "0.002"]
    trained = ["0.001", "0.002", "0.002", "0.004"]
    assert [label.rpartition(" ")[2] for label in cells.labels()] == trained
    # Cells of several global batches share a setting, not a rate.
    assert cells.label_of("optimizer.learning_rate") == "base learning rate"
    bases = ["base learning rate 0.001", "base learning rate 0.002"]
    assert list(setting_names(cells, cells.context_of).values()) == bases
    comparison = compare(cells)
    assert comparison["learning_rate"].tolist() == trained


def test_the_page_opens_with_the_same_cells(build):
    tables = load(sweep_of(build, SEARCHED).path)
    cells = find_cells(tables.runs)
    text, drawn = opening(cells, tables)
    assert "Settings: each global batch at its best learning rate" in text
    assert drawn == BEST_PAIRS


def opening(cells: Cells, tables: Any) -> tuple[str, set[tuple[float, float]]]:
    """What the page shows first, in words and in global batches and learning rates."""
    chart = loss_chart(cells, tables, None, Material(cells, tables).at_best)
    (choice,) = (choice for choice in chart.choices if choice.column == "setting")
    opens = next(iter(choice.options))
    rows = next(marks.table for marks in chart.marks if marks.kind == "line")
    run_positions = (
        rows.loc[[opens in options for options in rows["setting"]], "run"].explode().unique()
    )
    keys = ["global_batch_size", "optimizer.learning_rate"]
    drawn = pd.DataFrame(cells.runs[keys].astype(float).iloc[run_positions])
    return paper_caption(chart), set(drawn.itertuples(index=False, name=None))


def test_the_page_keeps_a_batch_without_a_best_rate(build):
    tables = load(sweep_of(build, SEARCHED, LOST).path)
    cells = find_cells(tables.runs)
    text, drawn = opening(cells, tables)
    assert "at its best learning rate, B = 16 at all where it has none" in text
    assert drawn == {(8, 0.0015), *product([16.0], SEARCHED[16]), (32, 0.006)}


@pytest.mark.slow
def test_a_global_batch_has_one_colour_in_all_figures(build):
    """Also in the figure of a group that lacks one of them."""
    sweep = sweep_of(build, {8: (0.001, 0.0015)}, data__layout="packed")
    for layout in ("packed", "padded"):
        sweep = sweep_of(build, {batch: SEARCHED[batch] for batch in (16, 32)}, data__layout=layout)
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    expected = {name.split(TIMES)[1]: look.colour for name, look in looks(cells).items()}
    assert len(set(expected.values())) == 3
    (section,) = (
        one for one in find_sections(Material(cells, tables)) if one.title == "Learning rate"
    )
    chart = section.pictures[0]
    assert {name: chart.looks[name].colour for name in expected} == expected


def test_ticks_stand_where_they_are_though_all_points_share_a_place():
    """Of one point, the axis names its own batch and no other at the same place."""
    rows = pd.DataFrame({"batch": [64], "loss": [2.0]})
    chart = Chart(
        "one",
        "",
        "",
        Axis({"batch": "batch"}, kind="log", ticks=[8, 64, 1024]),
        Axis({"loss": "loss"}),
        [Marks("point", rows)],
    )
    svg = vl_convert.vegalite_to_svg(paper_chart(chart))
    assert ">64<" in svg
    assert ">8<" not in svg
    assert ">1024<" not in svg
