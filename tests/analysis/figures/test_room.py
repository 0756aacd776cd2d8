"""Which cells a figure shows where it cannot show all, and what its caption says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from batchscape.analysis import compare, find_cells, load, write_report
from batchscape.analysis.cells import Cells, setting_texts
from batchscape.analysis.figures.curves import with_room
from batchscape.analysis.figures.style import looks
from batchscape.analysis.labels import setting_headers
from batchscape.analysis.numbers import TIMES
from batchscape.analysis.page.charts import learning_rate_charts
from batchscape.analysis.page.loss import loss_chart
from batchscape.analysis.page.settings import cell_names, setting_names
from batchscape.analysis.report.tables import comparison_table
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
    for batch, own in rates.items():
        for rate in own:
            loss = 2.0 + abs(np.log(rate / BEST[batch]))
            for seed in (0, 1):
                curves = {"loss": ending_at(loss), "held_out": ending_at(loss)}
                options = {"optimizer__learning_rate": rate, **settings}
                options |= (but or {}).get((batch, rate), {})
                sweep.run((1, batch, 1), seed=seed, **curves, **options)
    return sweep


def chosen(
    sweep: Any, panels: int = 6, *, timed: bool = False
) -> tuple[Cells, Cells, str, dict[int, float]]:
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    at_best = Material(cells, tables).at_best
    shown, said = with_room(cells, panels, at_best, timed=timed)
    return cells, shown, said, at_best


def pairs(cells: Cells) -> set[tuple[int, float]]:
    """Global batches and learning rates of the runs that are left."""
    keys = ["global_batch_size", "optimizer.learning_rate"]
    return set(cells.runs[keys].astype(float).itertuples(index=False, name=None))


def test_after_a_search_each_global_batch_is_shown_at_its_best_rate(build: Any) -> None:
    cells, shown, said, at_best = chosen(sweep_of(build, SEARCHED))
    assert pairs(shown) == BEST_PAIRS
    assert shown.contexts == []  # one panel
    assert {
        cells.table["global_batch_size"][cell]: r for cell, r in at_best.items()
    }.items() == BEST_PAIRS
    assert said.endswith(
        ": 0.00150 at B = 8, 0.00110 at B = 16, 0.00600 at B = 32; 6 of 9 cells are left out."
    )


def test_a_batch_whose_best_runs_have_no_valid_times_is_drawn_at_its_next_rate(build: Any) -> None:
    sweep = sweep_of(build, SEARCHED, {(16, 0.0011): {"concurrent_runs": 2}})
    _, shown, said, _ = chosen(sweep, timed=True)
    # The loss of 0.0016 is the next lowest: it is nearer to the best than 0.0024.
    assert pairs(shown) == {(8, 0.0015), (16, 0.0016), (32, 0.006)}
    assert shown.contexts == []
    assert said.endswith(
        ": 0.00150 at B = 8, 0.00600 at B = 32; where there is no curve at one, the cell of the "
        "fewest diverged runs, then the lowest loss: 0.00160 at B = 16 (2 completed); 5 of 8 cells "
        "are left out."
    )
    _, shown, said, _ = chosen(sweep)
    assert pairs(shown) == BEST_PAIRS
    assert "no curve" not in said


LOST = {(16, rate): {"status": "diverged"} for rate in SEARCHED[16]}


def test_a_batch_that_diverged_at_every_rate_is_drawn_and_named(build: Any) -> None:
    but = {**LOST, (64, 0.01): {"status": "oom", "stop_reason": None}}
    _, shown, said, _ = chosen(sweep_of(build, {**SEARCHED, 64: (0.01,)}, but))
    assert pairs(shown) == {(8, 0.0015), (16, 0.0011), (32, 0.006)}
    assert set(shown.runs.loc[shown.runs["global_batch_size"].eq(16), "status"]) == {"diverged"}
    assert ": 0.00150 at B = 8, 0.00600 at B = 32; where there is no curve at one, " in said
    assert ": 0.00110 at B = 16 (2 diverged); no curve at all: B = 64; 6 of 9 cells" in said


def test_a_rate_at_which_a_seed_diverged_comes_after_those_that_completed(build: Any) -> None:
    sweep = sweep_of(build, SEARCHED, {(16, 0.0011): {"concurrent_runs": 2}})
    curves = {"loss": ending_at(2.1), "held_out": ending_at(2.1)}
    sweep.run((1, 16, 1), seed=2, optimizer__learning_rate=0.0016, status="diverged", **curves)
    _, shown, said, _ = chosen(sweep, timed=True)
    assert pairs(shown) == {(8, 0.0015), (16, 0.0024), (32, 0.006)}
    assert "0.00240 at B = 16 (2 completed)" in said


def test_other_settings_keep_a_panel_each_and_the_rates_are_named(build: Any) -> None:
    rates = (0.0015, 0.003, 0.006)
    for engine in ("ddp", "fsdp"):
        sweep = sweep_of(build, {8: rates, 32: rates}, engine__name=engine)
    _, shown, said, at_best = chosen(sweep)
    assert pairs(shown) == {(8, 0.0015), (32, 0.006)}
    assert len(at_best) == 4
    assert shown.contexts == ["engine.name"]
    assert said.endswith(": 0.00150 at B = 8, 0.00600 at B = 32; 8 of 12 cells are left out.")


def test_of_a_grid_each_global_batch_is_shown_at_its_best_rate(build: Any) -> None:
    """In one panel, to compare global batches, even where there is room for one for each rate."""
    rates = (0.0015, 0.003, 0.006)
    _, shown, said, at_best = chosen(sweep_of(build, {8: rates, 32: rates}))
    assert pairs(shown) == {(8, 0.0015), (32, 0.006)}
    assert shown.contexts == []
    assert said.endswith(": 0.00150 at B = 8, 0.00600 at B = 32; 4 of 6 cells are left out.")
    assert set(at_best.values()) == {0.0015, 0.006}


def test_a_scaled_rate_is_the_one_that_was_trained_with(build: Any) -> None:
    """The rule doubles rates at B = 32. The runs of seed 1 have none, as rejected ones."""
    rates = (0.001, 0.002)
    runs = load(sweep_of(build, {8: rates, 32: rates}).path).runs
    factor = runs["global_batch_size"].map({8: 1.0, 32: 2.0})
    scaled = runs["optimizer.learning_rate"].astype(float) * factor
    cells = find_cells(runs.assign(learning_rate=scaled.mask(runs["seed"].eq(1))))
    assert cells.table["optimizer.learning_rate"].tolist() == ["0.001", "0.001", "0.002", "0.002"]
    trained = ["0.001", "0.002", "0.002", "0.004"]
    assert [label.rpartition(" ")[2] for label in cells.labels()] == trained
    names = [f"learning rate {rate}" for rate in trained]
    assert cell_names(cells).tolist() == names
    # Cells of several global batches share a setting, not a rate.
    assert cells.label_of("optimizer.learning_rate") == "base learning rate"
    bases = ["base learning rate 0.001", "base learning rate 0.002"]
    assert list(setting_names(cells, cells.context_of()).values()) == bases
    comparison = compare(cells)
    grid = comparison_table(comparison, cells).texts()
    position = list(grid.headers).index("learning rate")
    assert [row[position] for row in grid.rows] == trained
    assert comparison["learning_rate"].tolist() == trained
    assert setting_headers(["optimizer.learning_rate", "scaling.learning_rate"]) == [
        *("learning rate", "scaling of the learning rate"),
    ]
    near = pd.DataFrame({"learning_rate": ["0.0012341", "0.0012344", "0.1"]})
    assert setting_texts(near, "learning_rate").tolist() == ["0.0012341", "0.0012344", "0.1"]


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
    assert pairs(shown) == BEST_PAIRS
    assert "12 of 18 cells are left out" in said


@pytest.mark.slow
def test_a_report_of_a_search_says_what_its_figures_show(build: Any) -> None:
    report = write_report([sweep_of(build, SEARCHED).path])
    text = (report.out / "report.md").read_text()
    assert text.count("0.00150 at B = 8, 0.00110 at B = 16, 0.00600 at B = 32; 6 of 9 cells") == 3


def test_the_page_opens_with_the_same_cells(build: Any) -> None:
    tables = load(sweep_of(build, SEARCHED).path)
    cells = find_cells(tables.runs)
    text, drawn = opening(cells, tables)
    assert text == "each global batch at its best learning rate"
    assert drawn == BEST_PAIRS


def opening(cells: Cells, tables: Any) -> tuple[str, set[tuple[float, float]]]:
    """What the page shows first, in words and in global batches and learning rates."""
    chart = loss_chart(cells, tables, None, Material(cells, tables).at_best)
    assert chart is not None
    (choice,) = (choice for choice in chart.choices if choice.name == "setting")
    opens = next(iter(choice.options))
    shown = [t["meta"][0] for t in chart.traces if opens in t["when"]["setting"]]
    keys = ["global_batch_size", "optimizer.learning_rate"]
    drawn = pd.DataFrame(cells.runs[keys].astype(float).iloc[shown])
    return choice.options[opens], set(drawn.itertuples(index=False, name=None))


def test_the_page_keeps_a_batch_without_a_best_rate(build: Any) -> None:
    tables = load(sweep_of(build, SEARCHED, LOST).path)
    cells = find_cells(tables.runs)
    text, drawn = opening(cells, tables)
    assert text.endswith("at its best learning rate, B = 16 at all where it has none")
    assert drawn == {(8, 0.0015), *product([16.0], SEARCHED[16]), (32, 0.006)}


def test_a_global_batch_has_one_colour_in_all_figures(build: Any) -> None:
    """Also in the figure of a group that lacks one of them, and on the page."""
    sweep = sweep_of(build, {8: (0.001, 0.0015)}, data__layout="packed")
    for layout in ("packed", "padded"):
        sweep = sweep_of(build, {batch: SEARCHED[batch] for batch in (16, 32)}, data__layout=layout)
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    material = Material(cells, tables)
    viridis = {batch: mpl.colormaps["viridis"](0.44 * i) for i, batch in enumerate((8, 16, 32))}
    expected = {f"{batch}": mpl.colors.to_hex(colour) for batch, colour in viridis.items()}
    assert {name.split(TIMES)[1]: look.colour for name, look in looks(cells).items()} == expected
    (section,) = (one for one in find_sections(material) if one.title == "Learning rate")
    for picture, batches in zip(section.pictures, (["8", "16", "32"], ["16", "32"]), strict=True):
        (legend,) = picture.figure.legends
        names = [text.get_text() for text in legend.get_texts()]
        assert names == batches
        colours = [line.get_color() for line in legend.get_lines()]
        assert dict(zip(names, colours, strict=True)) == {name: expected[name] for name in batches}
    tables_of = {view.name: view.frame for view in section.tables}
    # The page knows no other batches than those of its costs but by what it is told.
    costs = section.curves["learning_rate_costs"].query("group == 1")
    best = tables_of["learning_rates"].query("group == 1")
    chart, *_ = learning_rate_charts(best, costs, {}, lambda _: [], [8, 16, 32])
    on_page = {t["name"]: t["marker"]["color"]["of"]["light"] for t in chart.traces}
    assert on_page == {"B = 16": expected["16"], "B = 32": expected["32"]}
