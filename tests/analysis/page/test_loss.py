"""Thinned curves keep what is extreme; the page carries the numbers of the run folders."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.analysis import find_cells, load
from batchscape.analysis.figures import loss as loss_module
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.figures.loss import loss_chart, thinned
from batchscape.analysis.numbers import TIMES
from batchscape.analysis.targets.curves import PROGRESS

DRAWN = """(figure, axis) => new Set(
    figure.view.data("t0").filter((row) => row[axis] !== null).map((row) => row.text)).size"""


DOMAIN = "(figure) => figure.view.scale('x').domain()[0]"

LOSSES = st.lists(
    st.lists(
        st.one_of(st.floats(0, 10, width=16), st.sampled_from([np.inf, np.nan])),
        min_size=1,
        max_size=60,
    ),
    min_size=1,
    max_size=4,
)


@given(LOSSES, st.integers(4, 30))
def test_the_ends_and_the_extremes_of_every_curve_stay(curves, points):
    rows = pd.DataFrame(
        [
            {"run": run, "place": place, "loss": loss}
            for run, losses in enumerate(curves)
            for place, loss in enumerate(losses)
        ]
    )
    kept = thinned(rows, "loss", points)
    for run, losses in enumerate(curves):
        curve = kept[kept["run"] == run]
        places = curve["place"].tolist()
        assert places == sorted(set(places))
        assert len(curve) <= max(points, 2)
        assert np.array_equal(curve["loss"], np.array(losses)[places], equal_nan=True)
        if len(losses) <= points:
            assert len(curve) == len(losses)
            continue
        assert {0, len(losses) - 1} <= set(places)
        finite = [loss for loss in losses if np.isfinite(loss)]
        if finite:
            assert {min(finite), max(finite)} <= set(curve["loss"])
        # By brute force: each window's own lowest and highest are there.
        windows = (points - 2) // 2
        for window in range(windows):
            inside = [x for i, x in enumerate(losses) if i * windows // len(losses) == window]
            finite_inside = [x for x in inside if np.isfinite(x)]
            if finite_inside:
                assert {min(finite_inside), max(finite_inside)} <= set(curve["loss"])


def test_of_many_runs_some_of_every_cell_are_drawn(build, monkeypatch):
    sweep = build()
    for cut, seeds in (((1, 8, 4), 3), ((1, 32, 1), 2), ((2, 8, 2), 1)):
        for seed in range(seeds):
            sweep.run(cut, seed=seed, status="timeout", reason="too long", stop_reason=None)
    sweep.reject((3, None, None), 32, "no such cut")
    tables = load(sweep.path)
    cells = find_cells(tables.runs)

    def drawn() -> list[int]:
        chart = loss_chart(cells, tables, None)
        assert chart is not None
        curve_rows = lines(chart, "eval_loss").drop_duplicates("text")
        positions = curve_rows["run"].explode().tolist()
        assert curve_rows["text"].tolist() == cells.runs["run_id"].iloc[positions].tolist()
        return sorted(positions)

    assert len(drawn()) == 6
    monkeypatch.setattr(loss_module, "_MOST_CURVES", 5)
    counts = cells.runs["cell"].iloc[drawn()].value_counts()
    assert sorted(counts) == [1, 2, 2]


def test_lines_of_a_cell_of_several_runs_are_their_mean_and_range(build):
    """What did not complete stays a line of its own; the mean ends with the first that ends."""
    sweep = build()
    folders = [sweep.run((1, 32, 1), seed=seed) for seed in (0, 1, 2)]
    sweep.run((1, 8, 4), seed=0)
    sweep.run((1, 8, 4), seed=1, done=25, stop_reason="target")
    ends = {"stop_reason": None, "reason": "the loss is NaN"}
    lost = sweep.run((1, 32, 1), seed=3, status="diverged", done=9, **ends)
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    chart = loss_chart(cells, tables, None)
    for kind, value in (("steps", "loss"), ("evals", "eval_loss")):
        recorded = [pd.read_parquet(folder.parquet(kind)) for folder in folders]
        losses = np.array([rows[value].to_numpy(float) for rows in recorded])
        drawn = lines(chart, value)
        drawn = drawn[drawn["series"].eq(name((1, 32, 1)))]
        mean = drawn[drawn["text"].eq("mean of 3 runs")]
        (band,) = (m.table for m in chart.marks if m.kind == "band" and value in m.table)
        band = band[band["series"].eq(name((1, 32, 1)))]
        np.testing.assert_allclose(mean[value], losses.mean(axis=0), rtol=1e-12)
        np.testing.assert_array_equal(band[f"{value}_low"], losses.min(axis=0))
        np.testing.assert_array_equal(band[f"{value}_high"], losses.max(axis=0))
        for table in (mean, band):
            behind = cells.runs["run_id"].iloc[table["run"].iloc[0]]
            assert set(behind) == {folder.path.name for folder in folders}
        assert set(drawn["text"]) == {"mean of 3 runs", lost.path.name}
    short = lines(chart, "loss").query("text == 'mean of 2 runs'")
    assert short["optimizer_step"].max() == 25


def test_axes_are_those_of_the_run_folders(build):
    """Every number of the curve of a run is the recorded one, to the last bit."""
    sweep = build()
    folders = [sweep.run(cut) for cut in ((1, 8, 4), (1, 32, 1))]
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    chart = loss_chart(cells, tables, None)
    for folder in folders:
        for kind, value in (("steps", "loss"), ("evals", "eval_loss")):
            recorded = pd.read_parquet(folder.path / f"{kind}.parquet")
            curve = lines(chart, value).query("text == @folder.path.name")
            for name in (value, *PROGRESS):
                assert np.array_equal(curve[name], recorded[name]), name


def test_runs_without_valid_times_have_no_curve_over_time(build):
    sweep = build()
    sweep.run((1, 32, 1))
    sweep.run((4, 8, 1))  # more ranks than cores
    tables = load(sweep.path)
    chart = loss_chart(find_cells(tables.runs), tables, None)
    assert chart is not None
    times = lines(chart, "loss").set_index("series")["train_time_s"]
    assert times[name((1, 32, 1))].notna().all()
    assert times[name((4, 8, 1))].isna().all()


def test_the_axis_is_cut_where_a_run_diverged(build):
    """For the kind of curve that needs it alone; the cross is on the last finite loss."""
    sweep = build()
    sweep.run((1, 32, 1))
    lost = {"status": "diverged", "reason": "the loss is infinite", "stop_reason": None}
    sweep.run(
        (1, 8, 1),
        loss=lambda step: np.where(step < 9, 3 + np.exp(step), np.inf),
        held_out=lambda step: 2 + 0.01 * np.exp(-step),
        **lost,
    )
    tables = load(sweep.path)
    chart = loss_chart(find_cells(tables.runs), tables, None)
    assert "eval_loss" not in chart.y.ranges
    usual = tables.steps.loc[tables.steps["run_id"].str.startswith("b32"), "loss"].max()
    assert usual < chart.y.ranges["loss"][1] < 2 * usual
    (cross,) = (m.table for m in chart.marks if m.name == "diverged" and "loss" in m.table)
    assert cross["optimizer_step"].tolist() == [8]


def name(geometry: tuple[int, int, int]) -> str:
    return TIMES.join(map(str, geometry))


def lines(chart: Chart, value: str) -> pd.DataFrame:
    """Return the rows of all curves of one kind."""
    (table,) = (m.table for m in chart.marks if m.kind == "line" and value in m.table)
    return table


@pytest.mark.slow
def test_500_runs_of_1000_points(build, tmp_path, browser):
    """The page of a large sweep is below 10 MB, and its curves draw and change."""
    from dataclasses import replace

    from batchscape.analysis.comparison import compare
    from batchscape.analysis.figures.comparison import comparison_charts
    from batchscape.analysis.page.page import html_page
    from batchscape.analysis.report.tables import comparison_table
    from batchscape.analysis.report.topic import Section

    sweep = build()
    sweep.run((1, 8, 1), optimizer_steps=1000)
    one = load(sweep.path)
    steps, evals, ranks, runs = ([] for _ in range(4))
    for number in range(500):
        name = f"run-{number}"
        batch = 8 * 2 ** (number % 5)
        rates = dict.fromkeys(["optimizer.learning_rate", "learning_rate"], 1e-3 * 1.01**number)
        settings = {"run_id": name, "trajectory_id": name, **rates}
        cut = {"micro_batch_size": batch, "global_batch_size": batch}
        runs.append(one.runs.assign(**settings, **cut))
        noise = 0.1 * np.random.default_rng(number).normal(size=1000)
        loss = one.steps["loss"].to_numpy() + noise
        steps.append(one.steps.assign(run_id=name, loss=loss))
        measured = one.steps.assign(run_id=name).rename(columns={"loss": "eval_loss"})
        evals.append(measured[["sweep_dir", "run_id", *PROGRESS, "eval_loss"]])
        ranks.append(one.ranks.assign(run_id=name))
    parts = (pd.concat(part, ignore_index=True) for part in (runs, steps, evals, ranks))
    tables = replace(one, **dict(zip(("runs", "steps", "evals", "ranks"), parts, strict=True)))
    cells = find_cells(tables.runs)
    comparison = compare(cells)
    loss = loss_chart(cells, tables, None)
    html = html_page(
        cells,
        comparison=Section(
            "Comparison",
            tables=[comparison_table(comparison, cells)],
            pictures=[loss, *comparison_charts(cells, comparison)],
        ),
        sections=[],
        notes=[],
        methods={},
    )
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    assert path.stat().st_size < 10e6
    rows = lines(loss, "loss")
    assert rows["curve"].nunique() == 500
    for number, curve in list(rows.groupby("curve"))[::100]:
        recorded = steps[number]["loss"]
        ends = {recorded.min(), recorded.max(), recorded.iloc[0], recorded.iloc[-1]}
        assert ends <= set(curve["loss"])
        assert len(curve) < 200
    page = browser(path)
    page.click("details#loss > summary")
    page.select_option("figure#loss select[data-choice=setting]", "")
    page.wait_for_selector("figure#loss[data-drawn=yes]", timeout=60_000)
    assert page.eval_on_selector("figure#loss", DRAWN, "optimizer_step") == 500
    page.select_option("figure#loss select[data-choice=x]", "samples")
    page.wait_for_selector("figure#loss[data-drawn=yes]", timeout=60_000)
    assert page.eval_on_selector("figure#loss", DRAWN, "samples") == 500
    _curves_move(page)


def _curves_move(page):
    before = page.eval_on_selector("figure#loss", DOMAIN)
    page.locator("figure#loss canvas").scroll_into_view_if_needed()
    box = page.locator("figure#loss canvas").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 3
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 100, y)
    page.mouse.up()
    for _ in range(50):  # the policy of the page lets no text become a function that waits
        if page.eval_on_selector("figure#loss", DOMAIN) < before:
            return
        page.wait_for_timeout(100)
    raise AssertionError(before)
