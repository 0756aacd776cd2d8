"""Which cells a figure shows where it has no room for all, and what its caption says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis import find_cells, load, write_report
from batchscape.analysis.cells import Cells
from batchscape.analysis.figures.curves import with_room
from batchscape.analysis.page.loss import loss_chart
from batchscape.analysis.report.topics import Material

SEARCHED = {8: (0.001, 0.0015, 0.00225), 16: (0.0011, 0.0016, 0.0024), 32: (0.003, 0.004, 0.006)}
BEST = {8: 0.0015, 16: 0.0011, 32: 0.006}


def ending_at(loss: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda when: loss + 3 * 0.9**when


def sweep_of(build: Any, rates: Mapping[int, Sequence[float]], **settings: Any) -> Any:
    """Write runs whose held-out loss is lowest, all along, at the rate that `BEST` names."""
    sweep = build()
    for batch, own in rates.items():
        for rate in own:
            loss = 2.0 + abs(np.log(rate / BEST[batch]))
            for seed in (0, 1):
                curves = {"loss": ending_at(loss), "held_out": ending_at(loss)}
                options = {"optimizer__learning_rate": rate, **settings}
                sweep.run((1, batch, 1), seed=seed, **curves, **options)
    return sweep


def chosen(sweep: Any, panels: int = 6) -> tuple[Cells, Cells, str, dict[int, float]]:
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    at_best = Material(cells, tables).at_best
    shown, said = with_room(cells, panels, at_best, timed=False)
    return cells, shown, said, at_best


def pairs(cells: Cells) -> set[tuple[int, float]]:
    """Global batches and learning rates of the runs that are left."""
    keys = ["global_batch_size", "optimizer.learning_rate"]
    return set(cells.runs[keys].astype(float).itertuples(index=False, name=None))


def test_after_a_search_each_global_batch_is_shown_at_its_best_rate(build: Any) -> None:
    cells, shown, said, at_best = chosen(sweep_of(build, SEARCHED))
    assert pairs(shown) == set(BEST.items())
    assert shown.contexts == []  # one panel
    assert {cells.table["global_batch_size"][cell]: r for cell, r in at_best.items()} == BEST
    assert said.endswith(
        ": 0.00150 at B = 8, 0.00110 at B = 16, 0.00600 at B = 32; 6 of 9 cells are left out."
    )


def test_a_grid_that_has_room_is_shown_whole(build: Any) -> None:
    rates = (0.0015, 0.003, 0.006)
    cells, shown, said, at_best = chosen(sweep_of(build, {8: rates, 32: rates}))
    assert pairs(shown) == pairs(cells)
    assert shown.contexts == cells.contexts
    assert said == ""
    assert set(at_best.values()) == {0.0015, 0.006}


def test_of_one_global_batch_the_best_rate_is_among_those_shown(build: Any) -> None:
    rates = (0.001, 0.0011, 0.0012, 0.0013, 0.0015)
    _, shown, said, _ = chosen(sweep_of(build, {8: rates}), panels=2)
    assert pairs(shown) == {(8, 0.0015), (8, 0.001)}
    assert said == (
        "2 of 5 settings are shown, with that of the best learning rate; 3 of 5 cells are left out."
    )


def test_other_settings_keep_panels_of_their_own(build: Any) -> None:
    for layout in ("packed", "padded"):
        sweep = sweep_of(build, SEARCHED, data__layout=layout)
    cells, shown, said, _ = chosen(sweep)
    assert set(shown.contexts) < set(cells.contexts)
    assert "optimizer.learning_rate" not in shown.contexts
    assert shown.context_of().loc[shown.runs["cell"]].nunique() == 2
    assert pairs(shown) == set(BEST.items())
    assert "12 of 18 cells are left out" in said


@pytest.mark.slow
def test_a_report_of_a_search_says_what_its_figures_show(build: Any) -> None:
    report = write_report([sweep_of(build, SEARCHED).path])
    text = (report.out / "details" / "comparison.md").read_text()
    assert text.count("0.00150 at B = 8, 0.00110 at B = 16, 0.00600 at B = 32; 6 of 9 cells") == 3
    assert report.curves[0].endswith("of each global batch that at its best learning rate")
    for line, (batch, rate) in zip(report.curves[1:], BEST.items(), strict=True):
        assert f"B = {batch}, " in line
        assert line.endswith(f"learning rate {rate}")


def test_the_page_opens_with_the_same_cells(build: Any) -> None:
    tables = load(sweep_of(build, SEARCHED).path)
    cells = find_cells(tables.runs)
    chart = loss_chart(cells, tables, None, Material(cells, tables).at_best)
    assert chart is not None
    (choice,) = (choice for choice in chart.choices if choice.name == "setting")
    opens = next(iter(choice.options))
    shown = [t["meta"][0] for t in chart.traces if opens in t["when"]["setting"]]
    keys = ["global_batch_size", "optimizer.learning_rate"]
    drawn = pd.DataFrame(cells.runs[keys].astype(float).iloc[shown])
    assert set(drawn.itertuples(index=False, name=None)) == set(BEST.items())
