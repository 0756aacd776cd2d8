"""The page in a real browser, offline: charts draw, and choices show the files' values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis import write_report

AXES = {
    "optimizer_step": "steps_to_target",
    "samples": "samples_to_target",
    "tokens": "tokens_to_target",
    "train_time_s": "time_to_target_s",
}
ALL_DRAWN = "[...document.querySelectorAll('figure.chart')].every((f) => f.dataset.drawn === 'yes')"
ROWS = """(figure, names) => Object.fromEntries(names.flatMap((name) => {
    try { return [[name, figure.view.data(name)]]; } catch { return []; } }))"""
PLACE = """(figure, [x, y]) => {
    const [left, top] = figure.view.origin();
    const padding = figure.view.padding();
    const at = figure.querySelector("canvas").getBoundingClientRect();
    return [
        at.x + padding.left + left + figure.view.scale("x")(x),
        at.y + padding.top + top + figure.view.scale("y")(y),
    ]; }"""


def content(page: Any) -> dict[str, Any]:
    embedded: dict[str, Any] = json.loads(page.text_content("#content"))
    return embedded


def drawn(page: Any, chart: str) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that are drawn, by what the legend says of all of them, or by mark."""
    declared = content(page)["charts"][chart]
    rows = page.eval_on_selector(f"main figure[id='{chart}']", ROWS, list(declared["tables"]))
    rows_by_name: dict[str, list[dict[str, Any]]] = {}
    for layer in next(iter(declared["specs"].values()))["layer"]:
        encoding = layer["encoding"]
        datum = encoding.get("stroke", encoding.get("color", {})).get("datum")
        key = datum or layer["mark"]["type"]
        rows_by_name.setdefault(key, []).extend(rows.get(layer["data"]["name"], []))
    return rows_by_name


def choose(page: Any, chart: str, **choices: str) -> dict[str, list[dict[str, Any]]]:
    for name, value in choices.items():
        page.select_option(f"main figure[id='{chart}'] select[data-choice={name}]", value)
    page.wait_for_selector(f"main figure[id='{chart}'][data-drawn=yes]")
    return drawn(page, chart)


def options(page: Any, chart: str, choice: str) -> list[str]:
    selector = f"main figure[id='{chart}'] select[data-choice={choice}] option"
    values: list[str] = page.eval_on_selector_all(selector, "o => o.map((one) => one.value)")
    return values


def legend(page: Any, chart: str) -> set[str]:
    rows = page.eval_on_selector(f"main figure[id='{chart}']", "f => f.view.data('legend')")
    return {row["series"] for row in rows}


@pytest.mark.slow
def test_the_page_of_a_sweep(varied, browser):
    out = write_report([varied.path], targets=[3.4, 2.55], with_charts=False).out
    page = browser(out / "report.html")
    page.wait_for_selector("header figure[data-drawn=yes]")
    page.click("#open-all")
    page.wait_for_function(ALL_DRAWN)
    names = page.eval_on_selector_all("main figure.chart", "f => f.map((one) => one.id)")
    assert {"heat_map", "cost", "loss", "steps_to_target", "pareto"} <= set(names)
    for name in names:
        assert page.locator(f"main figure[id='{name}'] canvas").count() == 1, name
        assert any(drawn(page, name).values()), name
    _loss_shows_the_reaches(page, out)
    _fields_are_those_of_the_comparison(page, out)
    _rows_open_and_sort(page)
    _points_open_their_runs(page)
    page.click("#theme")
    page.click("#theme")
    _fits_a_telephone_and_the_dark(browser(out / "report.html"))


def _loss_shows_the_reaches(page: Any, out: Path) -> None:
    reaches = pd.read_csv(out / "tables" / "reaches.csv")
    targets = options(page, "loss", "target")
    assert {float(target) for target in targets[1:]} == set(reaches["target_loss"].unique())
    runs = content(page)["runs"]["rows"]
    for axis, column in AXES.items():
        for target in (targets[1], targets[-1]):
            met = choose(page, "loss", x=axis, target=target)["met the target"]
            reached = reaches[
                reaches["target_loss"].eq(float(target)) & reaches["outcome"].eq("reached")
            ]
            expected = reached.set_index("run_id")[column]
            assert len(met) == len(reached) > 0
            for row in met:
                run, x = runs[row["runs"][0]][0], row[axis]
                assert (x is None and np.isnan(expected[run])) or x == expected[run]


def _fields_are_those_of_the_comparison(page: Any, out: Path) -> None:
    comparison = pd.read_csv(out / "tables" / "comparison.csv")
    legend_names: set[str] = set()
    values: list[float] = []
    for layer in options(page, "heat_map", "layer"):
        rows_by_name = choose(page, "heat_map", z="step_time_s", layer=layer)
        legend_names |= legend(page, "heat_map")
        for row in rows_by_name["rect"]:
            cells = comparison[
                comparison["micro_batch_size"].eq(row["micro_batch_size"])
                & comparison["data_parallel_size"].eq(row["data_parallel_size"])
            ]
            if row["step_time_s"] is not None:
                assert np.isclose(cells["step_time_s_mean"] * 1e3, row["step_time_s"]).any()
                values.append(row["step_time_s"])
    assert {"rejected", "out of memory", "diverged"} <= legend_names
    assert len(values) == comparison["step_time_s_mean"].notna().sum()


def _rows_open_and_sort(page: Any) -> None:
    table = "#comparison table >> nth=0"
    header = page.locator("#comparison thead .sort", has_text="final loss").first
    column = header.evaluate("button => button.closest('th').cellIndex")
    for sign in (1, -1):
        header.focus()
        page.keyboard.press("Enter")
        sort_values = page.eval_on_selector(
            table,
            "(table, at) => [...table.tBodies[0].rows].map((row) => row.cells[at].dataset.sort)",
            column,
        )
        numbers = [sign * float(value) for value in sort_values if value is not None]
        assert numbers == sorted(numbers)
        assert len(numbers) > 4
        assert all(value is None for value in sort_values[len(numbers) :])
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
    lines = choose(page, "loss", x="optimizer_step", y="eval_loss", target="")["line"]
    row = max(lines, key=lambda row: row["optimizer_step"])
    assert len(row["runs"]) == 3
    names = [content(page)["runs"]["rows"][position][0] for position in row["runs"]]
    page.locator("main figure#loss canvas").scroll_into_view_if_needed()
    at = [row["optimizer_step"], row["eval_loss"]]
    x, y = page.eval_on_selector("main figure#loss", PLACE, at)
    for away in (0, 5):  # a line is thin
        page.mouse.click(x + away, y)
        run_names = page.locator("dialog#runs[open] tbody td:first-child").all_text_contents()
        assert sorted(run_names) == sorted(names)
        page.keyboard.press("Escape")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 40, y)
    page.mouse.up()
    assert page.locator("dialog#runs[open]").count() == 0


def _fits_a_telephone_and_the_dark(page: Any) -> None:
    """Nothing is wider than a telephone but what scrolls by itself; every control has a name."""
    page.set_viewport_size({"width": 400, "height": 800})
    page.emulate_media(color_scheme="dark")
    page.click("#open-all")
    page.wait_for_function(ALL_DRAWN)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate("document.querySelector('figure#loss').view.background()") == "#16181c"
    nameless = """[...document.querySelectorAll('button, select, [role=img], [role=region]')]
        .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).length"""
    assert page.evaluate(nameless) == 0
    assert page.locator("#loss").get_by_label("Against").count() == 1
