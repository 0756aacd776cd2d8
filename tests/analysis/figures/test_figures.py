from __future__ import annotations

from itertools import cycle, pairwise
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETUPBASE
from matplotlib.patches import Rectangle

from batchscape.analysis import find_cells, load
from batchscape.analysis.figures.bars import MAX_BARS, draw_memory, draw_step_time, draw_throughput
from batchscape.analysis.figures.curves import loss_curves
from batchscape.analysis.figures.loss import MAX_MARKERS, MAX_PANELS, _marked, draw_loss
from batchscape.analysis.figures.style import looks, plain_ticks
from batchscape.analysis.numbers import TIMES
from batchscape.drawing import paper_style

pytestmark = pytest.mark.slow

ONE, FOUR = f"1{TIMES}32{TIMES}1", f"4{TIMES}8{TIMES}1"


def loss_figure(sweep: Any, against: Any = "optimizer_step") -> Figure:
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    timed = against == "train_time_s"
    with paper_style():
        curves = loss_curves(cells, tables.steps, tables.evals, timed=timed)
        figure = draw_loss(cells, curves, against, looks(cells))
        assert figure is not None
        figure.draw_without_rendering()
    return figure


def bar_figure(sweep: Any, draw: Any) -> Figure:
    cells = find_cells(load(sweep.path).runs)
    with paper_style():
        figure: Figure = draw(cells, looks(cells))
        figure.draw_without_rendering()
    return figure


def widths_of(axes: Axes) -> list[float]:
    return [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]


def seen(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_visible()]


def assert_nothing_is_cut_or_covered(figure: Figure) -> None:
    drawn = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert drawn.x0 >= -0.02
    assert drawn.y0 >= -0.02
    assert drawn.x1 <= width + 0.02
    assert drawn.y1 <= height + 0.02
    for axes in seen(figure):
        low, high = axes.get_xlim()
        ticks = [
            label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high
        ]
        labels = [*ticks, axes.xaxis.label, axes.title]
        boxes = [(t.get_text(), t.get_window_extent()) for t in labels if t.get_text()]
        for index, (name, box) in enumerate(boxes):
            for other, covered in boxes[index + 1 :]:
                apart = box.x1 <= covered.x0 + 1 or covered.x1 <= box.x0 + 1
                above = box.y1 <= covered.y0 + 1 or covered.y1 <= box.y0 + 1
                assert apart or above, (name, other)


def test_identical_trajectories_are_told_apart(build: Any) -> None:
    figure = loss_figure(build().fork())
    top, bottom = seen(figure)
    curves = [line for line in top.lines if len(line.get_xdata()) == 40]  # type: ignore[arg-type]  # arrays here
    assert len(curves) == 4
    assert len({(str(line.get_linestyle()), line.get_linewidth()) for line in curves}) == 4
    assert len({line.get_color() for line in curves}) == 4
    assert bottom.get_yscale() == "log"
    # Three differences from the first decomposition, and the spread between seeds.
    assert len(bottom.lines) == 4
    assert ONE in bottom.get_ylabel()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[0] == ONE
    assert legend[4:] == ["held-out loss", "sd between seeds"]
    assert_nothing_is_cut_or_covered(figure)


def test_equal_losses_are_said_to_be_equal(build: Any) -> None:
    sweep = build()
    sweep.run((1, 32, 1), rounding=0.0)
    sweep.run((1, 8, 4), rounding=0.0)
    bottom = seen(loss_figure(sweep))[1]
    assert [text.get_text() for text in bottom.texts] == ["equal to the last bit"]


@pytest.mark.parametrize("against", ["samples", "train_time_s"])
def test_other_axes_have_one_panel(build: Any, against: str) -> None:
    sweep = build().fork(seeds=(0, 1))
    figure = loss_figure(sweep, against)
    (axes,) = seen(figure)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert (FOUR in legend) == (against == "samples")
    assert axes.get_xlabel() == {"samples": "samples", "train_time_s": "training time (s)"}[against]
    assert_nothing_is_cut_or_covered(figure)


def test_a_diverging_run_does_not_press_the_others_together(build: Any) -> None:
    sweep = build()
    sweep.run(seed=0)
    sweep.run(seed=1, status="diverged", reason="NaN", loss=lambda step: 5 * 1.3**step)
    figure = loss_figure(sweep)
    (axes,) = seen(figure)
    assert axes.get_ylim()[1] < 7
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert len(crosses) == 1
    assert np.asarray(crosses[0].get_ydata())[0] == axes.get_ylim()[1]


def test_settings_get_panels_of_their_own_up_to_a_limit(build: Any) -> None:
    sweep = build()
    for rate, layout in zip(range(MAX_PANELS + 2), cycle(["packed", "padded"]), strict=False):
        sweep.run(
            optimizer_steps=3, optimizer__learning_rate=(1 + rate) / 1000, data__layout=layout
        )
    figure = loss_figure(sweep)
    panels = seen(figure)
    assert len(panels) == MAX_PANELS
    assert panels[1].get_title() == "layout packed\nlearning rate 0.003"
    assert_nothing_is_cut_or_covered(figure)


def test_each_geometry_keeps_its_colour_in_every_figure(build: Any) -> None:
    sweep = build().fork(seeds=(0,))
    cells = find_cells(load(sweep.path).runs)
    look = looks(cells)
    assert list(look) == [ONE, f"1{TIMES}8{TIMES}4", f"2{TIMES}8{TIMES}2", FOUR]
    expected = [item.colour.lower() for item in look.values()]
    bars = bar_figure(sweep, draw_throughput).axes[0].patches
    assert [mpl.colors.to_hex(bar.get_facecolor()) for bar in bars] == expected
    memory = bar_figure(sweep, draw_memory).axes[0].patches
    # The last of the four phases has the full colour.
    assert [mpl.colors.to_hex(bar.get_facecolor()) for bar in memory[-4:]] == expected


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
    whole = [look[f"1{TIMES}{batch}{TIMES}1"].colour for batch in batches]
    viridis = [mpl.colors.to_hex(mpl.colormaps["viridis"](0.88 * i / 2)) for i in range(3)]
    assert whole == viridis
    # Another cut of the largest batch is a paler shade.
    paler = mpl.colors.to_rgb(look[f"1{TIMES}8{TIMES}4"].colour)
    full = np.array(mpl.colors.to_rgb(viridis[2]))
    np.testing.assert_allclose(paler, 1 - 0.4 * (1 - full), atol=0.005)


def test_of_many_evaluations_some_are_marked_the_last_among_them() -> None:
    assert _marked(0) == []
    assert sorted(_marked(5)) == [0, 1, 2, 3, 4]
    for points in range(1, 200):
        marked = sorted(_marked(points))
        assert len(marked) <= MAX_MARKERS
        assert marked[-1] == points - 1
        assert len(set(np.diff(marked))) <= 1


@pytest.mark.parametrize("draw", [draw_step_time, draw_throughput])
def test_bars_say_why_there_is_no_time(build: Any, draw: Any) -> None:
    figure = bar_figure(build().fork(), draw)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()][3] == FOUR
    assert [text.get_text() for text in axes.texts] == ["oversubscribed: 4 ranks on 2 cores"]
    # One dot a run, for the three decompositions with times.
    assert [len(np.asarray(line.get_xdata())) for line in axes.lines] == [3, 3, 3]
    assert_nothing_is_cut_or_covered(figure)


def test_rows_are_as_high_as_their_names(build: Any) -> None:
    sweep = build()
    for name in ("adamw", "sgd"):
        for factor in (1, 2):
            sizes = {"n_layers": factor, "n_heads": 4 * factor, "d_model": 128 * factor}
            sweep.run(optimizer__name=name, model={"name": "gpt", **sizes})
    figure = bar_figure(sweep, draw_step_time)
    (axes,) = figure.axes
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in pairwise(boxes))


def test_step_times_stack_up_to_the_whole(build: Any) -> None:
    sweep = build().fork()
    runs = load(sweep.path).runs
    (axes,) = bar_figure(sweep, draw_step_time).axes
    first = [bar for bar in axes.patches if bar.get_y() == axes.patches[0].get_y()]  # type: ignore[attr-defined]  # rectangles
    parts = ["data_s", "forward_backward_s", "exchange_s", "optimizer_s"]
    mine = runs[(runs["data_parallel_size"] == 1) & (runs["micro_batch_size"] == 32)]
    mine = mine[mine["status"] == "completed"]
    widths = [bar.get_width() for bar in first]  # type: ignore[attr-defined]  # rectangles
    np.testing.assert_allclose(widths, 1000 * mine[parts].astype(float).mean())
    assert axes.get_xlabel().endswith("(ms)")


def test_memory_bars_are_means_in_a_unit_that_fits(build: Any) -> None:
    sweep = build().fork(seeds=(0, 1))
    figure = bar_figure(sweep, draw_memory)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "allocated memory (MiB)"
    assert len(axes.patches) == 4 * 4
    assert max(widths_of(axes)) == pytest.approx(89.29, abs=0.01)
    assert_nothing_is_cut_or_covered(figure)


def test_long_names_are_wrapped_and_many_cells_are_cut(build: Any) -> None:
    sweep = build()
    for rate in range(MAX_BARS + 3):
        sweep.run(
            optimizer_steps=6,
            loader__workers=1 + rate,
            hardware="A processor with quite a long name @ 3.20 GHz",
        )
    figure = bar_figure(sweep, draw_throughput)
    assert len(figure.axes[0].patches) == MAX_BARS
    assert_nothing_is_cut_or_covered(figure)


def test_cells_that_cost_the_same_by_their_settings_are_one_bar(build: Any) -> None:
    sweep = build()
    for rate in (0.001, 0.002):
        for seed in (0, 1):
            sweep.run((1, 8, 1), seed=seed, optimizer__learning_rate=rate)
            sweep.run((1, 8, 2), seed=seed, optimizer__learning_rate=rate)
    runs = load(sweep.path).runs
    (axes,) = bar_figure(sweep, draw_throughput).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        f"1{TIMES}8{TIMES}{n}" for n in (1, 2)
    ]
    means = runs.groupby("gradient_accumulation_steps")["tokens_per_s"].mean()
    np.testing.assert_allclose(widths_of(axes), means)


def test_bars_have_the_unit_that_all_cells_have(build: Any) -> None:
    sweep = build()
    sweep.run((1, 8, 1), task="class")
    sweep.run((1, 8, 2))
    runs = load(sweep.path).runs.sort_values("gradient_accumulation_steps")
    assert runs["tokens_per_s"].isna().tolist() == [True, False]
    (axes,) = bar_figure(sweep, draw_throughput).axes
    assert axes.get_xlabel() == "samples/s, all devices"
    np.testing.assert_allclose(widths_of(axes), runs["samples_per_s"])


def test_times_after_other_warmups_are_other_bars(build: Any) -> None:
    sweep = build()
    for repeat, steps in enumerate((0, 5)):
        sweep.run((1, 8, 1), measure__warmup_optimizer_steps=steps, timing_repeat=repeat)
    (axes,) = bar_figure(sweep, draw_throughput).axes
    assert len(axes.get_yticklabels()) == 2


def test_a_row_of_panels_without_differences_has_no_room_for_them(build: Any) -> None:
    sweep = build()
    for rate in range(5):
        sweep.run(optimizer_steps=6, optimizer__learning_rate=(1 + rate) / 1000)
    sweep.run((1, 8, 4), optimizer_steps=6, optimizer__learning_rate=0.001)
    figure = loss_figure(sweep)
    assert len(seen(figure)) == 6
    heights = [axes.get_position().height * figure.get_figheight() for axes in seen(figure)]
    assert max(heights[:5]) < 1.5 * min(heights[:5])
    assert figure.get_figheight() == pytest.approx(2 * 2.2 + 1.5 + 0.7, abs=0.05)
    assert_nothing_is_cut_or_covered(figure)


def test_panels_of_one_task_share_their_range(build: Any) -> None:
    sweep = build()
    for rate in range(4):
        sweep.run(optimizer_steps=3, optimizer__learning_rate=(1 + rate) / 1000)
    assert len({axes.get_ylim() for axes in seen(loss_figure(sweep))}) == 1


def test_a_spike_of_a_completed_run_leaves_the_panel_and_is_marked(build: Any) -> None:
    sweep = build()
    sweep.run((1, 8, 1), loss=lambda step: 3 * 0.95**step)
    sweep.run((1, 16, 1), loss=lambda n: np.where(np.isin(n, [7, 8, 20]), 1e10, 3 * 0.9**n))
    figure = loss_figure(sweep)
    (axes,) = seen(figure)
    assert 3 < axes.get_ylim()[1] < 9
    (carets,) = [line for line in axes.lines if line.get_marker() == CARETUPBASE]
    assert np.asarray(carets.get_xdata()).tolist() == [7, 20]
    assert set(np.asarray(carets.get_ydata())) == {axes.get_ylim()[1]}
    assert "beyond the panel" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert_nothing_is_cut_or_covered(figure)


def test_what_is_high_but_no_spike_is_not_cut(build: Any) -> None:
    sweep = build()
    sweep.run((1, 8, 1), loss=lambda step: 3 * 0.95**step)
    sweep.run((1, 16, 1), loss=lambda step: 6 * 0.95**step)
    figure = loss_figure(sweep)
    (axes,) = seen(figure)
    assert axes.get_ylim()[1] > 5.7
    assert not [line for line in axes.lines if line.get_marker() == CARETUPBASE]


def test_runs_that_all_diverged_are_seen_from_their_start(build: Any) -> None:
    sweep = build()
    for seed in range(2):
        lost = {"status": "diverged", "reason": "NaN", "seed": seed}
        sweep.run(loss=lambda n: np.where(n < 10, 3 - 0.1 * n, 1.5**n), **lost)
    (axes,) = seen(loss_figure(sweep))
    low, high = axes.get_ylim()
    assert low < 2.1
    assert 3 < high < 10


@pytest.mark.parametrize("ends", [(1.7, 3.1), (0.15, 1.5), (40, 1200), (0.2, 9e5), (0.06, 0.09)])
def test_a_tick_of_a_logarithmic_axis_says_where_it_stands(ends: tuple[float, float]) -> None:
    axes = Figure().subplots()
    axes.set_yscale("log")
    axes.set_ylim(*ends)
    plain_ticks(axes.yaxis)
    shown = [place for place in axes.get_yticks() if ends[0] <= place <= ends[1]]
    texts = axes.yaxis.get_major_formatter().format_ticks(shown)
    assert len(shown) >= 2
    assert [float(text) for text in texts] == pytest.approx(shown)
