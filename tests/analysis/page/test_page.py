"""What the page says, whoever named the runs; its tables lead to runs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from batchscape.analysis import find_cells, load, write_report
from batchscape.analysis.equivalence.topic import equivalence_section
from batchscape.analysis.page import page as page_module
from batchscape.analysis.page.page import RunIndex
from batchscape.analysis.report.topics import Material, find_sections

VENDOR = Path(page_module.__file__).parent / "vendor"


class Parsed(HTMLParser):
    """The elements of a page, its scripts and its texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = tag
        values = dict(attrs)
        self.links += [str(values[name]) for name in ("href", "src") if name in values]
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002  (HTMLParser gives it)
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.texts.append(data)


def content_of(html: str) -> dict[str, Any]:
    return json.loads(Parsed(html).scripts[0])


@pytest.mark.slow
def test_texts_of_others_do_nothing(build, monkeypatch):
    """A reason, a name and a setting may hold anything: no element, no secret, no control."""
    key = "f" * 20 + "0" * 20
    monkeypatch.setenv("WANDB_API_KEY", key)
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \x1b]0;t\x07 {{7*7}}"
    sweep = build(name="</title><script>alert(3)</script>")
    for seed in (0, 1):
        sweep.run((1, 32, 1), seed=seed)
        sweep.run((1, 8, 4), seed=seed)
    sweep.run((2, 32, 1), status="failed", reason=f"{hostile} {key}", stop_reason=None)
    sweep.reject((4, 32, None), 32, hostile)
    html = (write_report([sweep.path], with_charts=False).out / "report.html").read_text()
    parsed = Parsed(html)
    library, script = parsed.scripts[1:]
    assert len(parsed.scripts) == 3
    assert hashlib.sha256(library.encode()).hexdigest() == pinned()["vega.min.js"]
    assert "img" not in parsed.tags
    assert key not in html
    assert "\x1b" not in html
    assert any("alert(1)" in text for text in parsed.texts), "what was said is there as text"
    assert any("{{7*7}}" in text for text in parsed.texts)
    # The policy lets these two scripts run, and no other.
    policy = re.search(r"script-src ([^;]*);", html)[1]
    hashes = {f"'sha256-{digest(text)}'" for text in (library, script)}
    assert set(policy.split()) == hashes


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def pinned() -> dict[str, str]:
    hashes_by_file: dict[str, str] = tomllib.loads((VENDOR / "pinned.toml").read_text())["sha256"]
    return hashes_by_file


def test_the_library_is_the_pinned_one():
    files = {path.name for path in VENDOR.iterdir()} - {"pinned.toml"}
    assert files == set(pinned())
    for name, expected in pinned().items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == expected


@pytest.mark.slow
def test_links_lead_to_files_and_rows_to_their_runs(varied):
    """The runs behind each row of the comparison are those of its CSV file."""
    out = write_report([varied.path], with_charts=False).out
    html = (out / "report.html").read_text()
    links = [link for link in Parsed(html).links if not link.startswith("#")]
    assert links
    assert [link for link in links if not (out / link).is_file()] == []
    assert len(html) < 3e6
    names = [row[0] for row in content_of(html)["runs"]["rows"]]
    comparison = pd.read_csv(out / "tables" / "comparison.csv")
    section = html[html.index('id="comparison"') : html.index('id="loss"')]
    rows = re.findall(r'<tr data-runs="([\d,]+)">', section)
    run_ids_by_row = [{names[int(position)] for position in row.split(",")} for row in rows]
    expected = [set(ids.split(";")) for ids in comparison["run_ids"]]
    assert sorted(map(sorted, run_ids_by_row)) == sorted(map(sorted, expected))


def test_rows_open_nothing_that_is_not_sure(build):
    sweeps = [build("one"), build("two")]
    sweeps[0].run((1, 32, 1))
    sweeps[1].run((1, 32, 1), hardware="Other CPU", core_wait=1e-6)
    cells = find_cells(load(*(sweep.path for sweep in sweeps)).runs)
    index = RunIndex(cells)
    for position, row in enumerate(cells.runs.to_dict("records")):
        id_columns = {name: row[name] for name in ("run_id", "sweep_dir")}
        assert index.of_row(id_columns) == [position]
        assert index.of_row({"run_id": row["run_id"]}) == []
    # An id that is there as often as there are runs is of them all.
    twice = {"run_ids": ";".join(cells.runs["run_id"])}
    assert cells.runs["run_id"].nunique() == 1
    assert index.of_row(twice) == [0, 1]


@pytest.mark.slow
def test_cuts_of_two_experiments_are_not_on_one_line(build):
    sweep = build()
    for rate in (1e-3, 3e-3):
        for cut in ((1, 32, 1), (2, 8, 2), (1, 8, 4)):
            for seed in (0, 1):
                sweep.run(cut, seed=seed, optimizer={"name": "adamw", "learning_rate": rate})
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    section = equivalence_section(cells, tables)
    (chart,) = (one for one in section.pictures if one.name == "equivalence")
    points = chart.marks[0].table
    index = RunIndex(cells)
    for _, line in points.groupby("series"):
        assert len(line) == line["name"].nunique() == 4
        for behind, name in zip(index.of_rows(line), line["name"], strict=True):
            runs = cells.runs.iloc[behind]
            assert len(runs) == 2
            assert {f"learning rate {rate:g}" in name for rate in runs["learning_rate"]} == {True}


@pytest.mark.slow
def test_reaches_say_which_of_them_the_chart_shows(build):
    """Those at the best learning rate, one a trajectory."""
    sweep = build()
    for rate, floor in ((1e-3, 2.0), (3e-3, 1.5)):

        def loss(step, floor=floor):
            return floor + 3 * np.exp(-step / 5)

        for batch in (16, 32):
            sweep.run(
                (1, batch, 1),
                optimizer={"name": "adamw", "learning_rate": rate},
                loss=loss,
                held_out=loss,
            )
    tables = load(sweep.path)
    material = Material(find_cells(tables.runs), tables, targets=[2.4])
    (reaches,) = (
        s.chart_data["reaches"] for s in find_sections(material) if "reaches" in s.chart_data
    )
    assert reaches.loc[reaches["is_best"], "learning_rate"].tolist() == [3e-3, 3e-3]
    assert len(reaches) == 4
