"""The picture of memory's end: what is drawn, and that its rows keep their room."""

from __future__ import annotations

import pandas as pd
import pytest

from batchscape.analysis.cost.frontier import FIT, OUT, SKIPPED, memory_frontier
from batchscape.analysis.cost.frontier_figures import draw_frontier
from batchscape.drawing import paper_style

_NAMES = ["", "device.memory_limit_gib 0.3", "device.memory_limit_gib 0.6"]


def _rows(outcomes: list[tuple[int, int, str]]) -> pd.DataFrame:
    """Make a row of each group, micro-batch and outcome."""
    return pd.DataFrame(
        [
            {
                "group": group,
                "group_label": _NAMES[group],
                "data_parallel_size": 1,
                "micro_batch_size": micro,
                "gradient_accumulation_steps": 1,
                "outcome": outcome,
                "memory_gib": 1.0,
                "peak_gib": 0.5,
                "peak_figure": "peak_allocated_gib",
                "run_id": f"{group} {micro} {outcome}",
            }
            for group, micro, outcome in outcomes
        ]
    )


def test_the_legend_has_what_is_drawn() -> None:
    # Another seed of the micro-batch that ran out was not launched.
    rows = _rows([(0, 8, FIT), (0, 64, OUT), (0, 64, SKIPPED)])
    with paper_style():
        figure = draw_frontier(rows, memory_frontier(rows))
    assert figure is not None
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [FIT, OUT]


@pytest.mark.parametrize(
    ("outcomes", "room"),
    [
        ([(0, 8, FIT), (0, 64, OUT)], 3.0),
        ([(1, 8, FIT), (1, 64, OUT), (2, 8, FIT), (2, 64, FIT)], 1.4),
        ([(1, 8, FIT), (1, 64, OUT), (2, 8, FIT), (2, 32, OUT), (2, 64, SKIPPED)], 1.4),
    ],
    ids=["one row", "a row that never ran out", "a row of all"],
)
def test_rows_have_the_room_of_their_names_and_markers(
    outcomes: list[tuple[int, int, str]], room: float
) -> None:
    """An empty line that is not clipped took a third of it: `room` is in heights of a name."""
    rows = _rows(outcomes)
    with paper_style():
        figure = draw_frontier(rows, memory_frontier(rows))
        assert figure is not None
        figure.draw_without_rendering()
    axes = figure.axes[0]
    box = axes.get_window_extent()
    marker = max(line.get_markersize() for line in axes.lines) / 72 * figure.dpi
    names = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert box.height / len(names) > room * max(name.height for name in names)
    assert box.height / len(names) / 2 > marker
