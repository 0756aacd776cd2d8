"""What the machine may have ended is tried again, a stated number of times; nothing else is."""

from __future__ import annotations

import io
import itertools
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweeps_of_fakes import ENTRY, MACHINE, spec_named, wait_until

from batchscape.launch import attempt, forkserver
from batchscape.launch.child import start_interpreter
from batchscape.launch.launcher import Launcher
from batchscape.launch.result import SweepResult
from batchscape.record.folder import SweepFolder
from batchscape.record.state import is_tried_again
from batchscape.record.status import Cause, RunStatus, Status
from batchscape.record.tables import load

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from small_disk import fill, with_small_disk

AGAIN = {
    Cause.OTHER_MEMORY,
    Cause.HANG,
    Cause.SIGNAL,
    Cause.KILLED,
    Cause.LOST_CONNECTION,
    Cause.INFRASTRUCTURE,
}


class Sweep:
    def __init__(self, path: Path) -> None:
        self.folder = SweepFolder(path)
        self.printed = ""

    def run(self, *names: str, method: str = "fork", **launcher: Any) -> SweepResult:
        output = io.StringIO()
        result = Launcher(
            self.folder,
            MACHINE,
            [spec_named(name, **launcher) for name in names],
            entry=ENTRY,
            method=method,
            console=Console(file=output, width=300),
        ).run()
        self.printed = output.getvalue()
        return result

    def status(self, name: str) -> RunStatus:
        return RunStatus.read(self.folder.run(name).status)


@pytest.fixture(scope="module", autouse=True)
def _cold_interpreter() -> Iterator[None]:
    """Start fork servers as a launcher does, in a fresh interpreter each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "start_interpreter", start_interpreter)
        yield


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.setattr(attempt, "PEER_GRACE_S", 0.5)
    return Sweep(tmp_path / "sweep")


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_the_policy_is_by_status_and_cause_and_bounded(retries: int) -> None:
    for status, cause in itertools.product(Status, [None, *Cause]):
        expected = status is Status.FAILED and cause in AGAIN and retries > 0
        retried = is_tried_again(RunStatus(status, cause=cause), retries)
        assert retried == expected, (status, cause)


@pytest.mark.slow
def test_a_run_that_crashed_goes_on_from_its_checkpoint(sweep: Sweep) -> None:
    names = ("crashesonce", "segfaults", "exits7", "loses-d2", "completes")
    result = sweep.run(*names)
    statuses = {run.run_id: run.status for run in result.runs}
    assert statuses == {
        "crashesonce": Status.COMPLETED,
        "segfaults": Status.FAILED,
        "exits7": Status.FAILED,
        "loses-d2": Status.FAILED,
        "completes": Status.COMPLETED,
    }
    status = sweep.status("crashesonce")
    assert [(a.status, a.cause) for a in status.attempts] == [
        ("failed", "signal"),
        ("completed", None),
    ]
    assert [a.from_optimizer_step for a in status.attempts] == [0, 2]
    assert status.attempts[0].reason is not None
    assert status.attempts[0].reason.startswith("rank 0 was killed by SIGABRT")
    assert (status.cause, status.reason, status.rank) == (None, None, None)
    steps = load(sweep.folder.path).steps
    steps = steps[steps["run_id"] == "crashesonce"]
    assert list(steps["optimizer_step"]) == [1, 2, 3]
    assert list(steps["attempt"]) == [0, 0, 1]
    # What crashes every time ends, and what raised is not tried again.
    counts = {name: len(sweep.status(name).attempts) for name in names}
    assert counts == {
        "crashesonce": 2,
        "segfaults": 2,
        "exits7": 1,
        "loses-d2": 2,
        "completes": 1,
    }
    assert sweep.status("segfaults").cause is Cause.SIGNAL
    assert "rank 0 was killed by SIGSEGV" in str(sweep.status("segfaults").reason)
    assert (sweep.status("loses-d2").cause, sweep.status("loses-d2").rank) == (
        Cause.LOST_CONNECTION,
        0,
    )
    for name in ("crashesonce", "segfaults", "loses-d2"):
        assert f"{name}: retry 1 of 1 follows: " in sweep.printed
    assert "exits7: retry" not in sweep.printed
    assert "5 runs: 2 completed, 3 failed" in sweep.printed
    assert "[5/5]" in sweep.printed
    assert "[6/5]" not in sweep.printed


@pytest.mark.slow
def test_a_fork_server_that_dies_takes_no_run_with_it(sweep: Sweep) -> None:
    """The run that it takes along is tried again, by a new server, and the others run."""
    folder = sweep.folder.run("killsserver-d2")

    def allow() -> None:
        wait_until(folder.status.exists, "the run has no folder")
        wait_until(lambda: "running" in folder.status.read_text(), "the run does not start")
        (folder.path / "go").touch()

    thread = threading.Thread(target=allow)
    thread.start()
    result = sweep.run("killsserver-d2", "completes", "completes-later")
    thread.join()
    assert {run.status for run in result.runs} == {Status.COMPLETED}
    first, second = sweep.status("killsserver-d2").attempts
    assert (first.status, first.cause) == ("failed", "infrastructure")
    assert first.reason == (
        "the fork server died (killed by signal 9), and the ranks of the run with it"
    )
    assert second.status == "completed"
    assert "killsserver-d2: retry 1 of 1 follows: the fork server died" in sweep.printed


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have interpreters killed that are started; returns their list."""
    started, script = tmp_path / "started", tmp_path / "python"
    script.write_text(f"#!/bin/bash\necho x >> '{started}'\nkill -9 $$\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return started


def test_a_fork_server_that_is_killed_is_no_bad_input(sweep: Sweep, killed: Path) -> None:
    result = sweep.run("completes", "completes-later")
    assert killed.read_text().count("x") == 1
    assert result.why_stopped == (
        "no process can be started: the fork server was killed by signal 9 while it imported; "
        "look at the machine's memory"
    )
    # The command line leaves with 1 for what was stopped, and the same command goes on.
    assert not result.failed
    assert {run.status for run in result.runs} == {Status.PENDING}
    assert "no more were started; the same command goes on" in sweep.printed


@pytest.mark.slow
def test_where_no_server_can_be_had_the_other_runs_stay_pending(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sweep.folder.run("killsserver")
    interpreter = sys.executable

    def allow() -> None:
        wait_until(folder.status.exists, "the run has no folder")
        wait_until(lambda: "running" in folder.status.read_text(), "the run does not start")
        monkeypatch.setattr(sys, "executable", "/no/interpreter/here")
        (folder.path / "go").touch()

    thread = threading.Thread(target=allow)
    thread.start()
    result = sweep.run("killsserver", "completes-later")
    thread.join()
    assert result.why_stopped is not None
    assert result.why_stopped.startswith(
        "no process can be started any more: the fork server cannot be started again: "
    )
    assert "/no/interpreter/here" in result.why_stopped
    assert f"{result.why_stopped}: no more were started" in sweep.printed
    later = sweep.status("completes-later")
    assert (later.status, later.attempts) == (Status.PENDING, [])
    # The run that it took along is open as well: the same command goes on with both.
    assert sweep.status("killsserver").status is Status.INTERRUPTED
    assert len(sweep.status("killsserver").attempts) == 1
    monkeypatch.setattr(sys, "executable", interpreter)
    result = sweep.run("killsserver", "completes-later")
    assert {run.status for run in result.runs} == {Status.COMPLETED}
    assert [a.status for a in sweep.status("killsserver").attempts] == ["failed", "completed"]


def launched_on_a_full_temporary_disk(sweep: Sweep, place: Path) -> tuple[Any, ...]:
    """Launch where nothing temporary can be written, and again where it can."""
    tempfile.tempdir = str(place)
    filler = fill(place)
    full = sweep.run("completes", "completes-later", method="spawn")
    attempts = sweep.status("completes").attempts
    filler.unlink()
    again = sweep.run("completes", "completes-later", method="spawn")
    statuses = [[str(run.status) for run in result.runs] for result in (full, again)]
    return statuses, str(full.why_stopped), attempts


@pytest.mark.slow
def test_a_full_disk_of_temporary_files_fails_no_run(sweep: Sweep, tmp_path: Path) -> None:
    """What ranks share lies there: no run can start, and none of them is to blame."""
    place = tmp_path / "temporary"
    (first, second), stopped, attempts = with_small_disk(
        place, 1 << 20, launched_on_a_full_temporary_disk, sweep, place
    )
    assert first == ["pending"] * 2
    assert stopped.startswith(f"{place}/batchscape-scr")
    assert " cannot be written: No space left on device, 0 bytes free there" in stopped
    assert attempts == []
    assert second == ["completed"] * 2
