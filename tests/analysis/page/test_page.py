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
from batchscape.analysis.cells import GEOMETRY
from batchscape.analysis.claims.evidence import Evidence
from batchscape.analysis.claims.topic import claims_section
from batchscape.analysis.comparison import compare
from batchscape.analysis.decisions.topic import decision_section
from batchscape.analysis.equivalence.topic import equivalence_section
from batchscape.analysis.figures.comparison import comparison_charts
from batchscape.analysis.page import page as page_module
from batchscape.analysis.page.tables import RunIndex, html_table
from batchscape.analysis.report.tables import comparison_table
from batchscape.analysis.report.topic import Section
from batchscape.analysis.report.topics import Material, find_sections
from batchscape.analysis.tradeoff.topic import tradeoff_section
from batchscape.record.tables import Tables

GPT = {"name": "gpt", "n_layers": 2, "n_heads": 4, "d_model": 128}
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


@pytest.fixture
def joined(build: Any) -> Tables:
    """The same cuts on two machines; runs have the same ids on both."""
    sweeps = [build("one").fork((0, 1, 2)), build("two")]
    for cut in ((1, 32, 1), (4, 8, 1), (2, 8, 2), (1, 8, 4)):
        for seed in (0, 1, 2):
            sweeps[1].run(cut, seed=seed, hardware="Other CPU", core_wait=1e-6)
    return load(*(sweep.path for sweep in sweeps))


def content_of(html: str) -> dict[str, Any]:
    return json.loads(Parsed(html).scripts[0])


@pytest.mark.slow
def test_texts_of_others_do_nothing(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
    html = (write_report([sweep.path], figures=False).out / "report.html").read_text()
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


def test_the_library_is_the_pinned_one() -> None:
    files = {path.name for path in VENDOR.iterdir()} - {"pinned.toml"}
    assert files == set(pinned())
    for name, expected in pinned().items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == expected


@pytest.mark.slow
def test_links_lead_to_files_and_rows_to_their_runs(varied: Any) -> None:
    """The runs behind each row of the comparison are those of its CSV file."""
    out = write_report([varied.path], figures=False).out
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
    # Of a table that shows a part of its rows, each row has its own runs too.
    checked = 0
    claims = pd.read_csv(out / "tables" / "claims.csv").set_index("claim")
    for positions, claim in re.findall(
        r'data-runs="([\d,]+)">\s*<td[^>]*><button[^>]*>([\w-]+)</button>', html
    ):
        if claim in claims.index:
            ids = claims.loc[claim, "run_ids"].split(";")
            assert {names[int(n)] for n in positions.split(",")} == set(ids)
            checked += 1
    assert checked > 2


@pytest.mark.slow
def test_a_recommended_cut_opens_its_own_runs(joined: Tables) -> None:
    """On its own machine, though runs have the same ids on both; what is predicted has none."""
    tables, cells = joined, find_cells(joined.runs)
    assert cells.runs["run_id"].value_counts().eq(2).sum() == 12
    index = RunIndex(cells)
    section = decision_section(cells, tables)
    assert section is not None
    opened = []
    for view in section.tables:
        for row, positions in zip(
            view.rows or [], html_table(view, index.of_table(view)).runs, strict=True
        ):
            record = view.frame.loc[row]
            runs = cells.runs.iloc[list(positions)]
            assert (len(runs) > 0) == (record["source"] == "measured")
            for name in GEOMETRY:
                assert runs[name].eq(record[name]).all()
            opened += [(view.name, name) for name in runs["hardware"].unique()]
    machines = dict(opened)
    assert len(set(opened)) == len(machines) == len(set(machines.values())) == 2


def test_rows_open_nothing_that_is_not_sure(build: Any) -> None:
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
def test_claims_of_joined_folders_open_the_runs_of_their_machine(joined: Tables) -> None:
    tables, cells = joined, find_cells(joined.runs)
    section = claims_section(Evidence(cells, tables.steps, tables.evals, tables.ranks))
    assert section is not None
    (view,) = section.tables
    index = RunIndex(cells)
    rows = zip(view.rows or [], html_table(view, index.of_table(view)).runs, strict=True)
    opened = 0
    for record, positions in ((view.frame.loc[row], positions) for row, positions in rows):
        runs = cells.runs.iloc[list(positions)]
        assert sorted(set(runs["run_id"])) == sorted(filter(None, record["run_ids"].split(";")))
        assert all(hardware in record["context"] for hardware in runs["hardware"])
        opened += len(runs)
    assert opened > 24


@pytest.mark.slow
def test_joined_sweeps_are_called_by_their_names(build: Any, tmp_path: Path) -> None:
    """Not by the eight settings in which they differ; cells that never ran are theirs too."""
    one, two = build("one", name="first_study"), build("two", name="second_study")
    for seed in (0, 1):
        one.run((1, 32, 1), seed=seed)
        one.run((1, 8, 4), seed=seed)
        other = {"model": {**GPT, "n_layers": 4}, "loader": {"workers": 1}}
        two.run((1, 32, 1), seed=seed, schedule={"name": "cosine"}, **other)
    one.reject((2, 32, None), 32, "global_batch_size must be a multiple of 2 x 32 (32 is not)")
    report = write_report([one.path, two.path], tmp_path / "joint", figures=False)
    assert report.files[0].read_text().startswith("# first\\_study and second\\_study")
    html = (report.out / "report.html").read_text()
    loss = html[html.index('id="loss"') :]
    settings = re.search(r'data-choice="setting">(.*?)</select>', loss, re.DOTALL)[1]
    assert re.findall(r">(\w+)</option>", settings) == ["first_study", "second_study", "all"]


def test_chart_opens_at_what_the_sentence_speaks_of() -> None:
    """Of the first group, and the target of the most batch sizes; each row has its own runs."""
    rows = []
    for group in (0, 1):
        for batch in (8, 16, 32, 64):
            for seed in (0, 1, 2):
                for target, more in ((3.0, 1), (2.0, 3)):
                    steps = more * (100 + 4000 / batch) * (1 + 0.01 * seed)
                    met = batch < 64 or target > 2.5
                    rows.append(
                        {
                            "group": group,
                            "target_loss": target,
                            "global_batch_size": batch,
                            "seed": seed,
                            "run_id": f"g{group}-b{batch}-s{seed}",
                            "outcome": "reached" if met else "censored",
                            "steps_to_target": steps if met else np.nan,
                            "steps_low": steps,
                            "samples_to_target": np.nan,
                            "tokens_to_target": np.nan,
                            "time_to_target_s": np.nan,
                        }
                    )
    reaches = pd.DataFrame(rows)
    section = tradeoff_section(reaches)
    assert section is not None
    assert "a loss of 3" in section.short[0]
    chart = section.pictures[0]
    assert next(iter(chart.choices[0].options.values())) == "group 0: loss 3"
    assert len(chart.choices[0].options) == 4
    tables = {view.name: view.frame for view in section.tables}
    for name, runs in tables["tradeoff_fit"].groupby("group"):
        group = name.removeprefix("group ")
        for batch, ids in zip(runs["global_batch_size"], runs["run_ids"], strict=True):
            assert sorted(ids.split()) == [f"g{group}-b{batch:g}-s{seed}" for seed in (0, 1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("evaluated", [True, False])
def test_times_of_a_step_are_not_called_times_to_a_target(build: Any, evaluated: bool) -> None:
    sweep = build()
    for cut in ((1, 32, 1), (2, 8, 2), (1, 8, 4)):
        for seed in (0, 1, 2):
            sweep.run(cut, seed=seed, evaluated=evaluated)
    tables = load(sweep.path)
    section = decision_section(find_cells(tables.runs), tables)
    assert section is not None
    (card,) = page_module.recommended_cards([section])
    assert ("to the target" in card["time"]) == evaluated
    assert ("device-hours" in card["time"]) == evaluated
    assert card["time"].endswith(" a step") != evaluated
    assert [chart.name for chart in section.pictures] == ["pareto"] * evaluated


def test_costs_of_learning_rates_are_one_line_a_cut(build: Any) -> None:
    sweep = build()
    for rate in (1e-3, 3e-3, 9e-3):
        for micro in (8, 16):
            for loader in ({}, {"workers": 1}):
                optimizer = {"name": "adamw", "learning_rate": rate}
                sweep.run((1, micro, 1), optimizer=optimizer, loader=loader)
    cells = find_cells(load(sweep.path).runs)
    index = RunIndex(cells)
    (chart,) = (one for one in comparison_charts(cells, compare(cells)) if one.name == "cost")
    lines = chart.marks[0].table
    assert lines["series"].nunique() == 2, "fetching samples ahead decides the time of a step"
    for _, line in lines.groupby("series"):
        assert line["micro_batch_size"].tolist() == [8, 8, 8, 16, 16, 16]
        runs = cells.runs.iloc[[run for behind in index.of_rows(line) for run in behind]]
        assert sorted(runs["learning_rate"]) == [1e-3, 1e-3, 3e-3, 3e-3, 9e-3, 9e-3]


@pytest.mark.slow
def test_cuts_of_two_experiments_are_not_on_one_line(build: Any) -> None:
    sweep = build()
    for rate in (1e-3, 3e-3):
        for cut in ((1, 32, 1), (2, 8, 2), (1, 8, 4)):
            for seed in (0, 1):
                sweep.run(cut, seed=seed, optimizer={"name": "adamw", "learning_rate": rate})
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    section = equivalence_section(cells, tables)
    assert section is not None
    (chart,) = (one for one in section.pictures if one.name == "equivalence")
    points = chart.marks[0].table
    index = RunIndex(cells)
    for _, line in points.groupby("series"):
        assert len(line) == line["name"].nunique() == 4
        for behind, name in zip(index.of_rows(line), line["name"], strict=True):
            runs = cells.runs.iloc[behind]
            assert len(runs) == 2
            assert {f"learning rate {rate:g}" in name for rate in runs["learning_rate"]} == {True}


def test_a_layer_of_the_map_has_the_rate_that_its_cells_trained_with(build: Any) -> None:
    """A rule doubles the rates at B = 32; what was rejected there was trained with none."""
    sweep = build()
    for rate in (1e-3, 3e-3):
        for cut in ((1, 8, 1), (1, 4, 2), (1, 32, 1), (1, 8, 4)):
            sweep.run(cut, optimizer={"name": "adamw", "learning_rate": rate})
    sweep.reject((2, 32, None), 32, "global_batch_size must be a multiple of 64")
    runs = load(sweep.path).runs
    factor = runs["global_batch_size"].map({8: 1.0, 32: 2.0})
    scaled = runs["optimizer.learning_rate"].astype(float) * factor
    cells = find_cells(runs.assign(learning_rate=scaled.where(runs["status"].ne("rejected"))))
    chart = next(comparison_charts(cells, compare(cells)))
    assert chart.name == "heat_map"
    (layers,) = (choice.options for choice in chart.choices)
    assert sorted(layers.values()) == [
        *("32, learning rate 0.002", "32, learning rate 0.006"),
        *("8, learning rate 0.001", "8, learning rate 0.003"),
    ]


@pytest.mark.slow
def test_recommendations_without_room_are_counted(build: Any) -> None:
    sweep = build()
    for cut in ((1, 32, 1), (1, 8, 4)):
        sweep.run(cut)
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    section = decision_section(cells, tables)
    assert section is not None
    table = comparison_table(compare(cells), cells)
    html = page_module.html_page(
        Material(cells, tables),
        comparison=Section("Comparison", tables=[table]),
        sections=[section] * 5,
        notes=[],
        methods={},
    )
    assert html.count("Recommended geometry") == 3
    assert "2 more recommended" in html


@pytest.mark.slow
def test_reaches_say_which_of_them_the_chart_shows(build: Any) -> None:
    """Those at the best learning rate, one a trajectory."""
    sweep = build()
    for rate, floor in ((1e-3, 2.0), (3e-3, 1.5)):

        def loss(step: np.ndarray, floor: float = floor) -> np.ndarray:
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
    (reaches,) = (s.curves["reaches"] for s in find_sections(material) if "reaches" in s.curves)
    assert reaches.loc[reaches["is_best"], "learning_rate"].tolist() == [3e-3, 3e-3]
    assert len(reaches) == 4
