"""The report of a sweep as a W&B run of its own, against a small server that counts."""

from __future__ import annotations

import csv
import json
import re

import pytest
from PIL import Image

from batchscape.cli import main
from batchscape.record.status import Status
from batchscape.tracking.state import report_content, uploads_of

TABLES = ("comparison", "targets", "claims")
SENT = {
    *("report.html", "report.md", "figures/memory.png", "tables/runs.csv"),
    *(f"tables/{name}.csv" for name in TABLES),
}


@pytest.fixture
def report(sweep, fake_training, tmp_path):
    """A run that ended, and what `batchscape report` writes beside it, small.

    Links lead to what is not of the report, and its author has begun to write.
    """
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 6))
    training.end(Status.COMPLETED)
    for folder in ("tables", "figures", "paper/tables"):
        (sweep.report / folder).mkdir(parents=True)
    (sweep.report / "report.html").write_text("<p>which cut</p>")
    (sweep.report / "report.md").write_text("which cut")
    for name in (*TABLES, "runs"):
        rows = [["seeds", "note", "loss_mean"], [3, "NA", 1.5], ["", "null", ""], [2, "", 2]]
        with (sweep.report / "tables" / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    Image.new("RGB", (4, 4)).save(sweep.report / "figures" / "memory.png")
    for name in ("paper.tex", "paper.aux", "tables/comparison.tex"):
        (sweep.report / "paper" / name).write_text("a draft")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("not to be sent")
    (sweep.report / "data").symlink_to(tmp_path / "outside")
    (sweep.report / "link.md").symlink_to(tmp_path / "outside" / "secret")
    return sweep.report


def sync(sweep, capsys) -> str:
    assert main(["sync", str(sweep.path), "--project", "geometry"]) == 0
    captured = capsys.readouterr()
    return captured.out + captured.err


def sweep_run(server):
    (run,) = (run for run in server.runs.values() if run.settings["jobType"] == "report")
    return run


def check(server, sweep, rows: int = 1) -> None:
    """All of the report is there, in so many rows and as many versions of the artifact."""
    run = sweep_run(server)
    assert run.state == "finished"
    assert len(run.history) == run.lines_received == rows
    row = run.last_row
    for name in TABLES:
        table = row[f"report/{name}"]
        assert (table["_type"], table["nrows"], table["ncols"]) == ("table-file", 3, 3)
    kinds = {name: row[name]["_type"] for name in ("report/page", "figures/memory")}
    assert kinds == {"report/page": "html-file", "figures/memory": "image-file"}
    assert {value["path"] for value in row.values() if isinstance(value, dict)} <= run.files
    artifacts = [artifact for artifact in server.artifacts if artifact.type == "report"]
    assert len(artifacts) == rows
    assert artifacts[-1].files == SENT
    # Texts that pandas would take for missing, and whole numbers beside one that is.
    tables = [json.loads(c)["data"] for c in server.contents if c.startswith(b'{"columns"')]
    expected = [[3, "NA", 1.5], [None, "null", None], [2, None, 2.0]]
    assert len(tables) >= rows * len(TABLES)
    assert {json.dumps(data) for data in tables} == {json.dumps(expected)}
    assert {artifact.state for artifact in server.artifacts} == {"COMMITTED"}
    assert run.summary["report_sha256"] == report_content(sweep)


@pytest.mark.slow
def test_the_report_is_sent_once_and_anew_when_it_changed(
    sweep, server, report, tmp_path, capsys
) -> None:
    assert "uploaded 1 run, 1 report" in sync(sweep, capsys)
    check(server, sweep)
    run, (trained,) = sweep_run(server), (r for n, r in server.runs.items() if "run-a" in n)
    assert run.settings["groupName"] in trained.settings["groupName"]
    assert json.loads(trained.settings["config"])["sweep_id"]["value"] == run.settings["groupName"]
    assert run.settings["project"] == trained.settings["project"] == "geometry"
    received = len(server.contents)
    (report / "paper" / "paper.log").write_text("LaTeX was here")
    assert "nothing to upload" in sync(sweep, capsys)
    assert len(server.contents) == received
    # Nothing of W&B lies outside of the sweep.
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]

    (report / "report.html").write_text("<p>another cut</p>")
    assert "uploaded 1 report; 1 had" in sync(sweep, capsys)
    check(server, sweep, rows=2)
    assert len(server.runs) == 2
    # A lost note is asked of the server.
    sweep.mirror.unlink()
    assert "uploaded 1 report" in sync(sweep, capsys)
    check(server, sweep, rows=2)


@pytest.mark.usefixtures("report")
def test_what_an_author_adds_is_no_part_of_a_report(sweep, tmp_path) -> None:
    """Neither what links lead to outside, nor what comes to be in `paper/`."""
    before = report_content(sweep)
    (tmp_path / "outside" / "secret").write_text("another one")
    (tmp_path / "outside" / "more").write_text("not to be sent either")
    (sweep.report / "paper" / "paper.log").write_text("LaTeX was here")
    assert report_content(sweep) == before
    (sweep.report / "tables" / "comparison.csv").write_text("more")
    assert report_content(sweep) != before
    (sweep.report / "report.html").unlink()
    assert report_content(sweep) is None


def test_a_report_of_runs_that_never_began_waits_for_one(sweep, fake_training, capsys) -> None:
    """All of them were rejected: W&B has no run of the sweep that it could be called after."""
    training = fake_training("run-a")
    training.status.status = Status.REJECTED
    training.status.write(training.folder.status)
    sweep.report.mkdir()
    (sweep.report / "report.html").write_text("<p>nothing ran</p>")
    assert not uploads_of(sweep.path).lacks_report
    assert "nothing to upload" in sync(sweep, capsys)
    training.begin()
    assert uploads_of(sweep.path).lacks_report


@pytest.mark.slow
def test_a_workspace_is_saved_once(sweep, server, fake_training, monkeypatch, capsys) -> None:
    """Of the cells of this sweep, by names that its runs have."""
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setattr("batchscape.tracking.state.can_save_workspaces", lambda: True)
    training = fake_training("run-a")
    training.begin()
    training.train(range(1, 6))
    training.end(Status.COMPLETED)
    assert "uploaded 1 run, 1 workspace" in (printed := sync(sweep, capsys))
    assert f"Workspace: {server.url}/me/geometry?nw=" in printed
    assert "nothing to upload" in sync(sweep, capsys)
    (view,) = server.views
    run = server.run_of("run-a")
    sweep_id = json.loads(run.settings["config"])["sweep_id"]["value"]
    assert (view["entityName"], view["displayName"]) == ("me", sweep_id)
    section = json.loads(view["spec"])["section"]
    (runs,) = section["runSets"]
    assert {f["key"]["name"]: f["value"] for f in runs["filters"]["filters"]} == {
        "sweep_id": sweep_id,
        "jobType": run.settings["jobType"],
    }
    assert runs["grouping"] == [{"section": "run", "name": "group"}]
    panels = [panel for part in section["panelBankConfig"]["sections"] for panel in part["panels"]]
    assert {panel["viewType"] for panel in panels} == {
        *("Run History Line Plot", "Scatter Plot", "Parallel Coordinates Plot"),
    }
    curves = [panel["config"] for panel in panels if "Line" in panel["viewType"]]
    assert {curve["xAxis"] for curve in curves} == {"samples", "tokens", "train_time_s"}
    assert {(c["groupBy"], c["groupAgg"], c["groupArea"]) for c in curves} == {
        ("group", "mean", "minmax")
    }
    config, summary = json.loads(run.settings["config"]), run.summary
    drawn = {name for curve in curves for name in (curve["xAxis"], *curve["metrics"])}
    assert drawn <= {name for line in run.history for name in json.loads(line)}
    others = [str(panel["config"]) for panel in panels if "Line" not in panel["viewType"]]
    columns = {
        name for text in others for name in re.findall(r"'((?:config|summary):[^']+)'", text)
    }
    assert {n.removeprefix("summary:") for n in columns if n.startswith("s")} <= summary.keys()
    assert {
        n[len("config:") : -len(".value")] for n in columns if n.startswith("c")
    } <= config.keys()
    assert len(columns) == 7
