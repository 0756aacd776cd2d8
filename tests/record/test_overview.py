from __future__ import annotations

import io
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from batchscape.errors import RecordError
from batchscape.record.claims import CLAIMS
from batchscape.record.files import JsonLines, read_json, write_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.locks import is_held, take
from batchscape.record.overview import overview, overview_text
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status

HERE = f"process {os.getpid()} on {platform.node()}"


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    return SweepFolder(tmp_path)


@pytest.fixture
def add(sweep: SweepFolder, spec_of: Callable[..., RunSpec]) -> Callable[..., RunFolder]:
    spec = spec_of()

    def folder_of(name: str, status: RunStatus | None, rows: int = 0) -> RunFolder:
        folder = sweep.run(name)
        replace(spec, run_id=name).write(folder.config)
        if status is not None:
            status.write(folder.status)
        if rows:
            lines = JsonLines(folder.lines("steps"))
            lines.append({"optimizer_step": k + 1, "loss": 5.0 - k / 100} for k in range(rows))
            lines.close()
        return folder

    return folder_of


def test_no_runs(sweep: SweepFolder) -> None:
    with pytest.raises(RecordError, match="holds no runs"):
        overview(sweep)


def test_each_kind_of_folder(sweep: SweepFolder, add: Callable[..., RunFolder]) -> None:
    sealed = RunStatus(
        Status.COMPLETED,
        summary={"optimizer_steps": 20, "final_loss": 2.5},
        seal={"steps.parquet": {"bytes": 1, "sha256": "0"}},
    )
    add("a-completed", sealed).parquet("steps").write_bytes(b"1")
    add("b-rejected", RunStatus(Status.REJECTED, reason="no devices"))
    add("c-interrupted", RunStatus(Status.INTERRUPTED), rows=7)
    add("d-not-yet", None)
    add("e-damaged", None).config.write_text("{")
    torn = add("f-torn", RunStatus(Status.FAILED, reason="killed"), rows=3)
    with torn.lines("steps").open("a") as file:
        file.write('{"optimizer_step": 4, "lo')
    rows = {row.run_id: row for row in overview(sweep).runs}
    assert [row.status for row in rows.values()] == [
        "completed",
        "rejected",
        "interrupted",
        "pending",
        "unreadable",
        "failed",
    ]
    done = rows["a-completed"]
    assert (done.optimizer_step, done.optimizer_steps, done.loss) == (20, 20, 2.5)
    assert done.age_s is None
    assert rows["b-rejected"].reason == "no devices"
    stopped = rows["c-interrupted"]
    assert stopped.optimizer_step == 7
    assert stopped.loss == pytest.approx(4.94)
    assert stopped.age_s is not None
    assert rows["d-not-yet"].optimizer_step is None
    assert "damaged" in (rows["e-damaged"].reason or "")
    assert rows["f-torn"].optimizer_step == 3


def test_what_is_not_damaged_but_cannot_be_read(
    sweep: SweepFolder, add: Callable[..., RunFolder]
) -> None:
    add("a", RunStatus(Status.COMPLETED))
    folder = add("b", None)
    write_json(folder.status, {"format_version": 99})
    sweep.run("c").path.mkdir()  # its launcher is about to write into it
    sweep_overview = overview(sweep)
    assert [run.status for run in sweep_overview.runs] == ["completed", "unreadable", "pending"]
    assert "format version 99" in (sweep_overview.runs[1].reason or "")
    assert sweep_overview.next_steps == {"skip": 1, "begin": 1, "leave": 1}
    console = Console(width=80, file=io.StringIO())
    console.print(overview_text(sweep_overview))
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    assert "The same command now begins 1, leaves 1 alone, skips 1 done." in text
    assert "--retry" not in text


@pytest.mark.parametrize("left_out", ["status", "attempts", "seal"])
def test_a_status_without_its_parts_is_damage_of_that_run_alone(
    sweep: SweepFolder, add: Callable[..., RunFolder], left_out: str
) -> None:
    add("a", RunStatus(Status.COMPLETED))
    folder = add("b", RunStatus(Status.COMPLETED))
    content = read_json(folder.status)
    torn = {name: value for name, value in content.items() if name != left_out}
    for damaged in (torn, content | {"status": None}):
        write_json(folder.status, damaged)
        assert [run.status for run in overview(sweep).runs] == ["completed", "unreadable"]


def test_running_needs_a_launcher(sweep: SweepFolder, add: Callable[..., RunFolder]) -> None:
    add("a", RunStatus(Status.RUNNING), rows=2)
    (alone,) = overview(sweep).runs
    assert alone.status == "interrupted"
    assert alone.reason == "the launcher died"
    launcher, run = take(sweep.lock), CLAIMS.claim(sweep.run("a"))
    assert launcher is not None
    assert run is not None
    assert is_held(sweep.lock)
    (led,) = overview(sweep).runs
    assert (led.status, led.optimizer_step, led.launcher) == ("running", 2, HERE)
    run.release()
    # Another launcher is at work there, but not on this run.
    assert is_held(sweep.lock)
    assert overview(sweep).runs[0].status == "interrupted"
    launcher.release()
    assert not is_held(sweep.lock)


def test_between_two_attempts_a_run_is_its_launcher_s(
    sweep: SweepFolder, add: Callable[..., RunFolder]
) -> None:
    folder = add("a", RunStatus(Status.INTERRUPTED, reason="retry 1 of 1 follows: planted"), rows=2)
    claim = CLAIMS.claim(folder)
    assert claim is not None
    (row,) = overview(sweep).runs
    assert (row.status, row.launcher, row.reason) == ("running", HERE, None)
    claim.release()
    assert overview(sweep).runs[0].status == "interrupted"


def test_last_row_of_a_long_table(sweep: SweepFolder, add: Callable[..., RunFolder]) -> None:
    add("a", RunStatus(Status.INTERRUPTED), rows=5000)
    (row,) = overview(sweep).runs
    assert row.optimizer_step == 5000


def test_nan_is_no_loss(sweep: SweepFolder, add: Callable[..., RunFolder]) -> None:
    folder = add("a", RunStatus(Status.INTERRUPTED))
    lines = JsonLines(folder.lines("steps"))
    lines.append([{"optimizer_step": 1, "loss": float("nan")}])
    lines.close()
    (row,) = overview(sweep).runs
    assert row.loss is None


def test_sweep_folders_beside_a_missing_one_are_offered(tmp_path: Path) -> None:
    for name in ("fixed-3c831f9d", "fixed-aa", "else"):
        (tmp_path / name / "runs").mkdir(parents=True)
    (tmp_path / "fixed-no_sweep").mkdir()
    with pytest.raises(RecordError) as caught:
        overview(SweepFolder(tmp_path / "fixed")).runs[0]
    offered = f"did you mean {tmp_path / 'fixed-3c831f9d'} or {tmp_path / 'fixed-aa'}?"
    assert str(caught.value).endswith(offered)
    with pytest.raises(RecordError, match=r"did you mean .*/fixed-aa\?$"):
        overview(SweepFolder(tmp_path / "fixd-aa")).runs[0]
    with pytest.raises(RecordError, match=r"with runs in it$"):
        overview(SweepFolder(tmp_path / "nothing" / "alike")).runs[0]
