"""What the same command runs: what is missing, and nothing else."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path

import pytest
from fake_workers import Rank
from rich.console import Console
from sweeps_of_fakes import ENTRY, MACHINE, spec_named

from batchscape.launch.launcher import Launcher
from batchscape.launch.remaining import RemainingRuns, statuses_to_retry
from batchscape.launch.result import SweepResult
from batchscape.record.files import write_json
from batchscape.record.folder import TABLES, RunFolder, SweepFolder
from batchscape.record.overview import overview
from batchscape.record.status import FAULTS, Attempt, Cause, RunStatus, Status
from batchscape.record.tables import read_table, seal, verify_seal

SEALED = {Status.COMPLETED, Status.DIVERGED, Status.PRUNED}
MISSING = {Status.PENDING, Status.RUNNING, Status.INTERRUPTED, Status.REJECTED}


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    return SweepFolder(tmp_path / "sweep")


def begun(sweep: SweepFolder, name: str, status: Status, cause: Cause | None = None) -> RunFolder:
    """Make the folder of a run that was begun once, as its launcher left it."""
    spec, folder = spec_named(name), sweep.run(name)
    spec.write(folder.config)
    ranks = spec.geometry.data_parallel_size
    launch = {"attempt": 0, "world_size": ranks, "device_model": "a processor", "usable_cores": 2}
    write_json(folder.launch, {**launch, "timing_valid": True, "start_method": "spawn"})
    attempt = Attempt(started_at=1.0, from_optimizer_step=0)
    if status is not Status.RUNNING:
        attempt.ended_at, attempt.status = 2.0, str(status)
    RunStatus(status, cause=cause, attempts=[attempt]).write(folder.status)
    return folder


def launched(sweep: SweepFolder, *names: str) -> tuple[SweepResult, str]:
    printed = io.StringIO()
    specs = [spec_named(name) for name in names]
    console = Console(file=printed, width=300)
    result = Launcher(sweep, MACHINE, specs, entry=ENTRY, method="spawn", console=console).run()
    return result, printed.getvalue()


def test_every_status_is_sealed_or_missing_or_a_fault() -> None:
    assert set(Status) == SEALED | MISSING | FAULTS
    assert {status for status in Status if status.is_sealed} == SEALED


@pytest.mark.parametrize(
    ("names", "faults"),
    [
        ([], set()),
        (["failed"], {Status.FAILED}),
        (["oom", "timeout"], {Status.OOM, Status.TIMEOUT}),
        (["all"], {Status.FAILED, Status.OOM, Status.TIMEOUT}),
        (["all", "oom"], {Status.FAILED, Status.OOM, Status.TIMEOUT}),
    ],
)
def test_faults_stand_unless_they_are_named(
    sweep: SweepFolder, names: list[str], faults: set[Status]
) -> None:
    tried = [status for status in Status if status not in SEALED]
    for status in tried:
        begun(sweep, str(status), status)
    specs = [spec_named(str(status)) for status in (*tried, "new")]
    remaining = RemainingRuns(specs, sweep, statuses_to_retry(names))
    assert [spec.run_id for spec in remaining.missing] == [
        *(str(status) for status in tried if status in MISSING | faults),
        "new",
    ]
    assert {name: result.status for name, result in remaining.settled.items()} == {
        str(status): status for status in FAULTS - faults
    }
    assert all(result.skipped for result in remaining.settled.values())
    for name in ("new", "rejected"):
        assert RunStatus.read(sweep.run(name).status).status is Status.PENDING


def test_a_run_that_was_begun_and_has_no_status_is_damaged(sweep: SweepFolder) -> None:
    begun(sweep, "completes", Status.RUNNING).status.unlink()
    (run,) = overview(sweep).runs
    assert (run.status, run.next) == ("unreadable", "leave")
    result, printed = launched(sweep, "completes")
    assert [run.status for run in result.runs] == [Status.FAILED]
    assert "to run it again" in printed


def test_status_says_of_each_run_what_the_same_command_then_does(sweep: SweepFolder) -> None:
    """`next` beside what became of the run: its attempts, and whether it was sealed."""
    over = begun(sweep, "completes-over", Status.DIVERGED)
    for table in TABLES:
        over.lines(table).touch()
    seal(over, RunStatus.read(over.status), data_parallel_size=1)
    begun(sweep, "completes-stands", Status.FAILED, Cause.EXCEPTION)
    begun(sweep, "completes-full", Status.INTERRUPTED, Cause.DISK)
    further = begun(sweep, "completes-further", Status.INTERRUPTED)
    further.checkpoints.mkdir()
    (further.checkpoints / "step-000000002-0123456789abcdef.pt").touch()
    for name, status, cause in (
        ("completes-whole", Status.RUNNING, None),
        ("completes-unsealed", Status.FAILED, Cause.INFRASTRUCTURE),
    ):
        Rank(str(begun(sweep, name, status, cause).path), 0).complete()
    names = [folder.path.name for folder in sweep.run_folders()]
    before = {name: RunStatus.read(sweep.run(name).status) for name in names}
    content = json.loads(overview(sweep).as_json())
    assert content["state"] == "interrupted"
    launched(sweep, *names)
    done = {}
    for name in names:
        after = RunStatus.read(sweep.run(name).status)
        if len(after.attempts) > len(before[name].attempts):
            done[name] = "go_on" if name == "completes-further" else "begin"
        elif after.status is before[name].status:
            done[name] = "skip" if after.status.is_sealed else "leave"
        else:
            done[name] = "seal"
            assert after.status is Status.COMPLETED
    assert done == {run["run_id"]: run["next"] for run in content["runs"]}
    assert set(done.values()) == {"skip", "leave", "begin", "go_on", "seal"}
    assert json.loads(overview(sweep).as_json())["state"] == "finished"


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (Status.RUNNING, None),
        (Status.INTERRUPTED, Cause.DISK),
        (Status.FAILED, Cause.INFRASTRUCTURE),
    ],
)
def test_what_was_trained_to_its_end_is_sealed_from_its_rows(
    sweep: SweepFolder, status: Status, cause: Cause | None
) -> None:
    """The launcher died, or could not write: nothing is trained again."""
    folder = begun(sweep, "completes-d2", status, cause)
    for rank in (0, 1):
        Rank(str(folder.path), rank).complete()
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-000000001-0123456789abcdef.pt").touch()
    # A launcher that was killed while it sealed.
    folder.parquet("steps").write_bytes(b"half")
    result, printed = launched(sweep, "completes-d2")
    (run,) = result.runs
    assert (run.status, run.reason, run.by_another) == (Status.COMPLETED, None, False)
    assert "completes-d2 completed: its rows were whole already" in printed
    assert not folder.log.exists()
    written = RunStatus.read(folder.status)
    (attempt,) = written.attempts
    assert (attempt.status, attempt.reason, attempt.cause) == ("completed", None, None)
    assert (written.cause, written.stop_reason) == (None, "budget")
    verify_seal(folder, written)
    assert list(read_table(folder, "steps")["optimizer_step"]) == [1, 2, 3]
    names = {path.name for path in folder.path.iterdir()}
    assert not {name for name in names if "outcome" in name or name in {".lock", "checkpoints"}}
    assert launched(sweep, "completes-d2")[0].runs[0].skipped


@pytest.mark.parametrize("leftover", ["one outcome", "rows cut short", "ranks that disagree"])
def test_what_was_not_trained_to_its_end_goes_on(sweep: SweepFolder, leftover: str) -> None:
    folder = begun(sweep, "completes-d2", Status.RUNNING)
    Rank(str(folder.path), 0).complete()
    if leftover == "rows cut short":
        Rank(str(folder.path), 1).complete()
        lines = folder.lines("steps").read_bytes().splitlines(keepends=True)
        folder.lines("steps").write_bytes(b"".join(lines[:-1]) + lines[-1][:9])
    elif leftover == "ranks that disagree":
        Rank(str(folder.path), 1).outcome("diverged", "the loss is not finite")
        folder.lines("steps").unlink()
    folder.log.touch()
    last_line_at = time.time() + 1000
    os.utime(folder.log, (last_line_at, last_line_at))
    result, _ = launched(sweep, "completes-d2")
    assert [run.status for run in result.runs] == [Status.COMPLETED]
    attempts = RunStatus.read(folder.status).attempts
    assert attempts[0].ended_at == pytest.approx(last_line_at, abs=1e-3)
    assert [(a.status, a.reason) for a in attempts] == [
        ("interrupted", "the launcher died"),
        ("completed", None),
    ]


def test_a_fault_is_no_end_that_could_not_be_written(sweep: SweepFolder) -> None:
    folder = begun(sweep, "completes-d2", Status.FAILED, Cause.EXCEPTION)
    Rank(str(folder.path), 0).complete()
    Rank(str(folder.path), 1).outcome("failed", "planted failure")
    result, _ = launched(sweep, "completes-d2")
    assert [run.run_id for run in result.failed] == ["completes-d2"]
    assert len(RunStatus.read(folder.status).attempts) == 1


@pytest.mark.parametrize("before", [Status.PENDING, Status.RUNNING, Status.FAILED])
@pytest.mark.parametrize("after", list(Status))
def test_what_another_launcher_has_ended_meanwhile(
    sweep: SweepFolder, before: Status, after: Status
) -> None:
    folder = begun(sweep, "completes", before)
    remaining = RemainingRuns([spec_named("completes")], sweep, statuses_to_retry(["all"]))
    assert [spec.run_id for spec in remaining.missing] == ["completes"]
    assert remaining.settle_now(spec_named("completes")) is None
    status = RunStatus.read(folder.status)
    status.status = after
    status.attempts.append(Attempt(started_at=3.0, from_optimizer_step=0))
    status.write(folder.status)
    result = remaining.settle_now(spec_named("completes"))
    if after in SEALED | FAULTS | {Status.REJECTED}:
        assert result is not None
        assert (result.status, result.by_another) == (after, True)
    else:
        assert result is None
