"""The page about statuses names every status, cause and setting that there is, and no other."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from batchscape.cli import main
from batchscape.config import RunConfig
from batchscape.record.folder import SweepFolder
from batchscape.record.overview import (
    CAUSE_ADVICE,
    STATES,
    STATUS_ADVICE,
    UNREADABLE,
    UNREADABLE_ADVICE,
    Overview,
    RunProgress,
)
from batchscape.record.spec import RunSpec
from batchscape.record.state import Next
from batchscape.record.status import Attempt, Cause, RunStatus, Status

PAGE = Path(__file__).parents[1] / "docs" / "statuses.md"


def table_under(title: str) -> dict[str, list[str]]:
    """Return the cells of each row of the first table of a section, by its first name."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line[:1] == "|"][2:]
    return {row[0].strip(" `"): [cell.strip() for cell in row[1:]] for row in rows}


def test_every_status_is_explained() -> None:
    assert set(table_under("Statuses")) == {UNREADABLE, *map(str, STATUS_ADVICE)}


def test_every_cause_is_explained_with_what_to_do() -> None:
    rows = table_under("Causes")
    assert set(rows) == set(map(str, Cause)) == set(map(str, CAUSE_ADVICE))
    for name, cells in rows.items():
        assert cells[-1] == CAUSE_ADVICE[Cause(name)]
        assert (cells[-2] == "yes") == Cause(name).is_of_the_machine


def test_every_setting_that_is_named_exists(config_of: Callable[..., RunConfig]) -> None:
    keys = set(re.findall(r"\b((?:launcher|device|checkpoint)\.\w+)", PAGE.read_text()))
    advice_text = " ".join([*CAUSE_ADVICE.values(), *STATUS_ADVICE.values()])
    keys |= set(re.findall(r"\b(launcher\.\w+)", advice_text))
    config = config_of()
    for key in keys:
        group, _, name = key.partition(".")
        assert name in {field.name for field in fields(getattr(config, group))}, key
    # And the other way round: what decides how a launch goes on is explained.
    deciding = {field.name for field in fields(config.launcher)} - {"name", "device"}
    assert {f"launcher.{name}" for name in deciding} <= keys


def test_every_name_of_the_json_is_explained() -> None:
    text = PAGE.read_text().split("## `batchscape status DIR --json`")[1]
    names = set(re.findall(r"`(\w+)`", text))
    assert names >= {*map(str, Next), *STATES}
    assert names >= {field.name for field in fields(RunProgress)} | {"next", "advice"}
    run = RunProgress("a", "pending", None, None, None, None, None)
    content = json.loads(Overview(Path("x"), "finished", (), (run,)).as_json())
    assert names >= set(content) | set(content["runs"][0])


def test_faults_are_told_by_their_cause() -> None:
    for status, cause, expected in (
        (Status.FAILED, Cause.HANG, CAUSE_ADVICE[Cause.HANG]),
        (Status.FAILED, None, STATUS_ADVICE[Status.FAILED]),
        (Status.COMPLETED, None, STATUS_ADVICE[Status.COMPLETED]),
        (UNREADABLE, None, UNREADABLE_ADVICE),
    ):
        assert RunProgress("a", str(status), cause=cause).advice == expected


@pytest.fixture
def sweep(tmp_path: Path, spec_of: Callable[..., RunSpec]) -> SweepFolder:
    """A sweep with a run in every state, as launchers and ranks leave them."""
    sweep = SweepFolder(tmp_path / "a sweep")
    spec = spec_of()
    ended = Attempt(started_at=0.0, from_optimizer_step=0, ended_at=1.0, status="failed")
    for name, status in {
        "killed": RunStatus(
            Status.FAILED, reason="rank 1 is gone", cause=Cause.KILLED, rank=1, phase="forward",
            attempts=[ended, ended],
        ),
        "full": RunStatus(
            Status.INTERRUPTED, reason="no room", cause=Cause.DISK, attempts=[ended]
        ),
        "large": RunStatus(Status.OOM, reason="out", cause=Cause.OUT_OF_MEMORY, attempts=[ended]),
        "lost": RunStatus(Status.RUNNING, attempts=[ended]),
        "waiting": RunStatus(Status.PENDING),
        "wrong": RunStatus(Status.REJECTED, reason="16 / 3 leaves 1"),
        "exploded": RunStatus(Status.DIVERGED, reason="not finite", cause=Cause.DIVERGENCE),
    }.items():  # fmt: skip
        folder = sweep.run(name)
        spec.write(folder.config)
        status.write(folder.status)
    sweep.run("broken").path.mkdir()
    sweep.run("broken").config.write_text("{")
    return sweep


def test_status_of_every_kind_of_run(
    sweep: SweepFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.plan.write_text("run_id,planned\nunborn,launch\nwrong,rejected\n")
    assert main(["status", str(sweep.path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["state"] == "interrupted"
    assert answer["launchers"] == []
    assert {run["run_id"]: (run["status"], run["next"]) for run in answer["runs"]} == {
        "broken": ("unreadable", "leave"),
        "exploded": ("diverged", "skip"),
        "full": ("interrupted", "begin"),
        "killed": ("failed", "leave"),
        "large": ("oom", "leave"),
        "lost": ("interrupted", "begin"),
        "unborn": ("pending", "begin"),
        "waiting": ("pending", "begin"),
        "wrong": ("rejected", "reject"),
    }
    assert main(["status", str(sweep.path)]) == 0
    text = capsys.readouterr().out
    counts = "2 pending, 1 oom, 1 diverged, 1 failed, 2 interrupted, 1 unreadable; 1 run"
    assert f"8 runs: {counts}" in text
    assert "Failed: killed (1)" in text
    assert "Out of memory (1)" in text
    assert "killed  rank 1 in forward, 2 attempts" in text
    assert "without a checkpoint: it begins again; no room" in text
    assert "add --retry failed,oom" in text


@pytest.mark.parametrize("content", ["", "run_id\n", "\0", "run_id,planned\n"])
def test_a_folder_that_is_no_sweep(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.csv").write_text(content)
    assert main(["status", str(tmp_path)]) == 2
    assert "holds no runs" in capsys.readouterr().err


CHAOS = Path(__file__).parent / "chaos"
SLOW_DATA = (
    *("data=custom", "data._target_=chaos_data.Points", "model=mlp", "model.hidden_sizes=[8]"),
    *("batch.global_batch_size=16", "batch.micro_batch_size=4", "batch.data_parallel_size=2"),
    *("seed=0,1", "budget.samples=800", "evaluation.every_samples=null", "evaluation.samples=16"),
    *("measure.memory=false", "checkpoint.every_s=0.0", "launcher.device=cpu", "tracker=none"),
)


@pytest.mark.slow
@pytest.mark.usefixtures("heeded_signals")
def test_status_of_a_sweep_that_runs_is_interrupted_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real one, of two ranks: what is said of it at each of the three times."""
    sweep = tmp_path / "sweep"
    command = ["sweep", *SLOW_DATA, f"sweep_dir='{sweep}'"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{CHAOS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "BATCHSCAPE_CHAOS_DELAY_S": "0.05",
    }
    with (tmp_path / "printed.txt").open("ab") as printed:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "batchscape", *command],
            env=environment,
            stdout=printed,
            stderr=printed,
        )

    def status() -> tuple[dict[str, Any], str]:
        assert main(["status", str(sweep), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert main(["status", str(sweep)]) == 0
        return answer, capsys.readouterr().out

    deadline = time.monotonic() + 120
    while True:
        assert launcher.poll() is None, (tmp_path / "printed.txt").read_text()
        assert time.monotonic() < deadline, "no run is under way"
        if sweep.exists() and any(sweep.glob("runs/*/steps.jsonl")):
            answer, text = status()
            running = [run for run in answer["runs"] if run["status"] == "running"]
            if running and (running[0]["optimizer_step"] or 0) >= 8:
                break
        time.sleep(0.1)
    assert answer["state"] == "running"
    assert sorted(run["status"] for run in answer["runs"]) == ["pending", "running"]
    (run,) = running
    assert run["launcher"] == f"process {launcher.pid} on {platform.node()}"
    # Two samples of each rank's half sleep 0.05 s each: 0.4 s a step at least, of 50 steps.
    assert run["left_s"] > 0.39 * (50 - run["optimizer_step"])
    # Asked again, it has gone on.
    assert re.search(r" \d+/50 .* ago +1", text)

    launcher.send_signal(signal.SIGINT)
    launcher.wait()
    answer, text = status()
    assert answer["state"] == "interrupted"
    assert sorted(run["status"] for run in answer["runs"]) == ["interrupted", "pending"]
    (run,) = (run for run in answer["runs"] if run["status"] == "interrupted")
    assert run["checkpoint_step"] == run["optimizer_step"] >= 8
    assert f"goes on from step {run['checkpoint_step']}" in text
    assert (run["left_s"], run["launcher"]) == (None, None)

    monkeypatch.syspath_prepend(CHAOS)
    assert main(command) == 0, capsys.readouterr()
    capsys.readouterr()
    answer, text = status()
    assert [run["status"] for run in answer["runs"]] == ["completed"] * 2
    assert sorted(run["attempts"] for run in answer["runs"]) == [1, 2]
    assert answer["state"] == "finished"
    assert "The same command" in text
