"""The page in a real browser, offline: charts draw, and choices show the files' values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis import write_report
from batchscape.analysis.numbers import MISSING

AXES = {
    "optimizer_step": "steps_to_target",
    "samples": "samples_to_target",
    "tokens": "tokens_to_target",
    "train_time_s": "time_to_target_s",
}
DATA = """(f) => f.querySelector('.drawing')._fullData.filter((t) => t.visible).map((t) => ({
    name: t.name, symbol: String(t.marker && t.marker.symbol), type: t.type, mode: t.mode,
    text: t.text, x: t.x && Array.from(t.x), y: t.y && Array.from(t.y), z: t.z && Array.from(t.z),
    custom: t.customdata }))"""


CATEGORIES = """(({ xaxis, yaxis }) => [xaxis.categoryarray, yaxis.categoryarray])(
    document.querySelector("figure#heat_map .drawing")._fullLayout)"""


def drawn(page: Any, chart: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.eval_on_selector(f"[id='{chart}']", DATA)
    return found


def choose(page: Any, chart: str, **choices: str) -> list[dict[str, Any]]:
    for name, value in choices.items():
        page.select_option(f"[id='{chart}'] select[data-choice={name}]", value)
    page.wait_for_timeout(300)
    return drawn(page, chart)


def options(page: Any, chart: str, choice: str) -> list[str]:
    selector = f"[id='{chart}'] select[data-choice={choice}] option"
    values: list[str] = page.eval_on_selector_all(selector, "o => o.map((one) => one.value)")
    return values


@pytest.mark.slow
def test_the_page_of_a_sweep(varied: Any, browser: Any) -> None:
    out = write_report([varied.path], targets=[3.4, 2.55], figures=False).out
    page = browser(out / "report.html")
    page.wait_for_selector("header figure[data-drawn=yes]")
    page.click("#open-all")
    page.wait_for_function(
        "[...document.querySelectorAll('figure.chart')].every((f) => f.dataset.drawn === 'yes')"
    )
    names = page.eval_on_selector_all("main figure.chart", "f => f.map((one) => one.id)")
    assert {"heat_map", "cost", "loss", "steps_to_target", "pareto"} <= set(names)
    for name in names:
        assert page.locator(f"[id='{name}'] .main-svg").count() > 0
        assert drawn(page, name), name
    _loss_shows_the_reaches(page, out)
    _steps_are_those_of_the_reaches(page, out)
    _fields_are_those_of_the_comparison(page, out)
    _rows_open_and_sort(page)
    _points_open_their_runs(page)
    page.click("#theme")
    page.click("#theme")
    _fits_a_telephone_and_the_dark(browser(out / "report.html"))


def _loss_shows_the_reaches(page: Any, out: Path) -> None:
    reaches = pd.read_csv(out / "tables" / "reaches.csv")
    targets = options(page, "loss", "target")
    assert [float(target) for target in targets[1:]] == sorted(
        reaches["target_loss"].unique(), reverse=True
    )
    runs = json.loads(page.text_content("#content"))["runs"]["rows"]
    for axis, column in AXES.items():
        for target in (targets[1], targets[-1]):
            marks = [
                (runs[custom[0]][0], x)
                for trace in choose(page, "loss", axis=axis, target=target)
                if trace["symbol"] == "triangle-down" and trace["mode"] == "markers"
                for custom, x in zip(trace["custom"], trace["x"], strict=True)
            ]
            own = reaches[
                reaches["target_loss"].eq(float(target)) & reaches["outcome"].eq("reached")
            ]
            expected = own.set_index("run_id")[column]
            assert len(marks) == len(own) > 0
            for run, x in marks:
                assert (x is None and np.isnan(expected[run])) or x == expected[run]
    # The training curve of a run, on every axis, is that of its folder.
    for axis in AXES:
        for trace in choose(page, "loss", axis=axis, curve="loss")[:3]:
            folder = next((out.parent / "runs").glob(trace["text"]))
            recorded = pd.read_parquet(folder / "steps.parquet")
            assert np.array_equal(trace["y"], recorded["loss"])
            if axis != "train_time_s" or trace["x"][0] is not None:
                assert np.array_equal(trace["x"], recorded[axis])


def _steps_are_those_of_the_reaches(page: Any, out: Path) -> None:
    reaches = pd.read_csv(out / "tables" / "reaches.csv")
    curve = pd.read_csv(out / "tables" / "tradeoff_curve.csv")
    names = [row[0] for row in json.loads(page.text_content("#content"))["runs"]["rows"]]
    censored = 0
    for key in options(page, "steps_to_target", "target"):
        group, target = key.split("|")
        own = reaches[reaches["group"].eq(int(group)) & reaches["target_loss"].eq(float(target))]
        own = own[own["is_best"]]
        for column in AXES.values():
            traces = choose(page, "steps_to_target", target=key, quantity=column)
            runs = next(trace for trace in traces if trace["name"] == "runs")
            met = own[own["outcome"].eq("reached")]
            assert len(runs["x"]) == len(met) == met["trajectory_id"].nunique() > 0
            values = met.set_index("run_id")[column]
            points = zip(runs["custom"], runs["x"], runs["y"], strict=True)
            for (position,), batch, value in points:
                run = names[position]
                assert batch == met.set_index("run_id")["global_batch_size"][run]
                assert value == values[run] or (value is None and np.isnan(values[run]))
        fit = curve[curve["group"].eq(int(group)) & curve["target_loss"].eq(float(target))]
        traces = choose(page, "steps_to_target", target=key, quantity="steps_to_target")
        named = {trace["name"]: trace for trace in traces}
        if len(fit):
            assert np.allclose(named["fit"]["y"], fit["steps"], rtol=1e-12)
            assert np.allclose(named["perfect scaling"]["y"], fit["perfect_steps"], rtol=1e-12)
        short = own[own["outcome"].isin(["censored", "pruned"]) & own["status"].ne("oom")]
        censored += len(short)
        assert ("not reached: more than this" in named) == (len(short) > 0)
        assert any(name.startswith("diverged: 1 at B = 128") for name in named)
    assert censored > 0


def _fields_are_those_of_the_comparison(page: Any, out: Path) -> None:
    comparison = pd.read_csv(out / "tables" / "comparison.csv")
    seen: dict[str, int] = {}
    fields = 0
    for layer in options(page, "heat_map", "layer"):
        for trace in choose(page, "heat_map", figure="step_time_s", layer=layer):
            if trace["type"] == "heatmap":
                # Of places that are not all there plotly would stretch some over the others.
                axes = page.evaluate(CATEGORIES)
                assert (trace["x"], trace["y"]) == tuple(axes)
            else:
                seen[trace["name"]] = seen.get(trace["name"], 0) + len(trace["x"])
                continue
            for devices, line, texts in zip(trace["y"], trace["z"], trace["text"], strict=True):
                for micro, value, text in zip(trace["x"], line, texts, strict=True):
                    rows = comparison[
                        comparison["micro_batch_size"].eq(int(micro))
                        & comparison["data_parallel_size"].eq(int(devices))
                    ]
                    assert (value is None) == (text in {"", MISSING})
                    assert value is None or np.isclose(rows["step_time_s_mean"] * 1e3, value).any()
                    fields += value is not None
    assert {"rejected", "out of memory", "diverged"} <= set(seen)
    assert fields == comparison["step_time_s_mean"].notna().sum()


def _rows_open_and_sort(page: Any) -> None:
    table = "#comparison table >> nth=0"
    header = page.locator("#comparison thead .sort", has_text="final loss").first
    column = header.evaluate("button => button.closest('th').cellIndex")
    for sign in (1, -1):
        header.focus()
        page.keyboard.press("Enter")
        shown = page.eval_on_selector(
            table,
            "(table, at) => [...table.tBodies[0].rows].map((row) => row.cells[at].dataset.sort)",
            column,
        )
        known = [sign * float(value) for value in shown if value is not None]
        assert known == sorted(known)
        assert len(known) > 4
        assert all(value is None for value in shown[len(known) :])
    first = page.locator("#comparison button.runs").first
    first.focus()
    page.keyboard.press("Enter")
    assert first.get_attribute("aria-expanded") == "true"
    behind = page.locator("#comparison tr.behind tbody tr")
    runs = page.eval_on_selector("#comparison tr[data-runs]", "row => row.dataset.runs")
    assert behind.count() == len(runs.split(","))
    page.keyboard.press("Enter")
    assert page.locator("#comparison tr.behind").count() == 0


def _points_open_their_runs(page: Any) -> None:
    page.eval_on_selector(
        "#loss .drawing",
        "place => place.emit('plotly_click', { points: [{ data: place.data[0] }] })",
    )
    assert page.locator("dialog#runs[open] tbody tr").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("dialog#runs[open]").count() == 0


def _fits_a_telephone_and_the_dark(page: Any) -> None:
    """Nothing is wider than a telephone but what scrolls by itself; every control has a name."""
    page.set_viewport_size({"width": 400, "height": 800})
    page.emulate_media(color_scheme="dark")
    page.click("#open-all")
    page.wait_for_function(
        "[...document.querySelectorAll('figure.chart')].every((f) => f.dataset.drawn === 'yes')"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    back = page.evaluate("document.querySelector('#loss .drawing')._fullLayout.paper_bgcolor")
    assert back == "#16181c"
    nameless = """[...document.querySelectorAll('button, select, [role=img], [role=region]')]
        .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).length"""
    assert page.evaluate(nameless) == 0
    assert page.locator("#loss").get_by_label("Against").count() == 1


@pytest.mark.slow
def test_learning_rates_and_noise_scales(build: Any, browser: Any) -> None:
    sweep = build(name="learning_rate")
    for batch in (8, 16, 32):
        for rate in (1e-3, 3e-3, 9e-3):
            for seed in (0, 1, 2):
                # Parabolas in the logarithm of the rate, whose lowest points grow with the batch.
                away = np.log(rate / (2e-3 * (batch / 8) ** 0.5))

                def loss(step: np.ndarray, seed: int = seed, away: float = away) -> np.ndarray:
                    return 2 + 3 * np.exp(-step / 9) + 0.2 * away**2 + 0.01 * seed

                sweep.run(
                    (1, batch // 2, 2),
                    seed=seed,
                    optimizer_steps=320 // batch,
                    loss=loss,
                    held_out=loss,
                    noise=(2.0, 0.1),
                    optimizer={"name": "adamw", "learning_rate": rate},
                )
    out = write_report([sweep.path], figures=False).out
    page = browser(out / "report.html")
    page.click("#open-all")
    page.wait_for_function(
        "[...document.querySelectorAll('figure.chart')].every((f) => f.dataset.drawn === 'yes')"
    )
    settings = options(page, "loss", "setting")
    assert settings == ["", "best", "s0", "s1", "s2"]
    for setting in settings:
        names = {trace["name"] for trace in choose(page, "loss", setting=setting)}
        legend = page.locator("[id='loss'] .legendtext").all_text_contents()
        assert sorted(legend) == sorted(names), "whatever is chosen, each colour has its entry"
    best = pd.read_csv(out / "tables" / "learning_rates.csv")
    (optima,) = drawn(page, "learning_rates")
    inside = best[best["learning_rate"].notna()]
    assert len(inside) >= 2
    assert optima["x"] == inside["global_batch_size"].tolist()
    assert np.allclose(optima["y"], inside["learning_rate"], rtol=1e-12)
    costs = pd.read_csv(out / "tables" / "learning_rate_costs.csv")
    value = "steps_to_target" if "steps_to_target" in costs else "final_eval_loss"
    points = sorted(
        (x, y)
        for t in drawn(page, "learning_rate_costs")
        for x, y in zip(t["x"], t["y"], strict=True)
    )
    known = costs[np.isfinite(costs[value])]
    assert np.allclose(points, sorted(zip(known["learning_rate"], known[value], strict=True)))
    noise = pd.read_csv(out / "tables" / "noise_scale.csv")
    identified = noise[noise["note"].isna()]
    shown = next(t for t in drawn(page, "noise_scale") if t["name"] == "noise scale")
    assert np.allclose(sorted(shown["y"]), sorted(identified["estimate"]))
    # Rows of one geometry and several learning rates have the runs of their own rate.
    ids = [row[0] for row in json.loads(page.text_content("#content"))["runs"]["rows"]]
    table = page.locator("table", has_text="noise scale (samples)").first
    rows = table.locator("tr[data-runs]").evaluate_all("rows => rows.map((r) => r.dataset.runs)")
    runs = pd.read_csv(out / "tables" / "runs.csv").set_index("run_id")
    assert len(rows) == 9
    for row, rate in zip(rows, noise["optimizer.learning_rate"], strict=True):
        own = runs.loc[[ids[int(position)] for position in row.split(",")]]
        assert own["learning_rate"].tolist() == [rate] * 3
