"""The picture of memory's end, where it has one row and not every outcome."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.cost.frontier import FIT, OUT, SKIPPED, memory_frontier
from batchscape.analysis.cost.frontier_figure import draw_frontier
from batchscape.analysis.figures.style import paper_style


def test_markers_of_a_single_row_are_clear_of_the_axis_and_the_legend_has_what_is_drawn() -> None:
    # Another seed of the micro-batch that ran out was not launched.
    outcomes = [(8, FIT), (64, OUT), (64, SKIPPED)]
    rows = pd.DataFrame(
        [
            {
                "group": 0,
                "group_label": "",
                "data_parallel_size": 1,
                "micro_batch_size": micro,
                "gradient_accumulation_steps": 1,
                "outcome": outcome,
                "memory_gib": 1.0,
                "peak_gib": 0.5,
                "peak_figure": "peak_allocated_gib",
                "run_id": f"{micro} {outcome}",
            }
            for micro, outcome in outcomes
        ]
    )
    with paper_style():
        figure = draw_frontier(rows, memory_frontier(rows))
        assert figure is not None
        figure.draw_without_rendering()
    axes = figure.axes[0]
    marker = axes.lines[0].get_markersize() / 72 * figure.dpi
    assert axes.get_window_extent().height / 2 > marker
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [FIT, OUT]
