"""What killed launchers leave: ranks are waited for, unfinished files removed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launchers import Elsewhere
from rich.console import Console
from sweeps_of_fakes import ENTRY, MACHINE, is_alive, spec_named, wait_until

from batchscape.launch.launcher import Launcher
from batchscape.launch.result import SweepResult
from batchscape.record import tables
from batchscape.record.claims import CLAIMS
from batchscape.record.files import write_atomically
from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import clear_away

DIES = """
import os, sys
from pathlib import Path
from batchscape.record import files
files.os.fsync = lambda _: os._exit(9)
files.write_atomically(Path(sys.argv[1]), b"half")
"""


def died_while_writing(path: Path) -> Path:
    """Have a process die in the middle of a file; return what it leaves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = subprocess.Popen([sys.executable, "-c", DIES, str(path)])
    assert writer.wait() == 9
    assert not path.exists()
    temporary = path.with_name(f".{path.name}.{writer.pid}.tmp")
    assert temporary.read_bytes() == b"half"
    return temporary


def test_unfinished_files_of_a_run_are_removed_and_others_are_not(tmp_path: Path) -> None:
    run = SweepFolder(tmp_path).run("completes")
    dead = [
        died_while_writing(path)
        for path in (run.status, run.lines("steps"), run.checkpoints / "step-1.pt")
    ]
    kept = [
        run.path / f".wandb.json.{os.getpid()}.tmp",
        run.path / "notes.123.tmp.txt",
        run.program / ".data.999999999.tmp",
    ]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    write_atomically(run.config, b"whole")
    clear_away(run)
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in (*kept, run.config))


def test_on_a_file_system_of_several_machines_they_stay_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "is_of_this_machine", lambda _: False)
    run = SweepFolder(tmp_path).run("completes")
    old, new = died_while_writing(run.status), died_while_writing(run.launch)
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    clear_away(run)
    assert (old.exists(), new.exists()) == (False, True)


def test_a_launch_removes_them(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "sweep")
    temporary = died_while_writing(sweep.run("completes").status)
    half = sweep.run("completes").path / "steps.tmp"
    half.write_bytes(b"a table that was being sealed")
    result = Launcher(
        sweep,
        MACHINE,
        [spec_named("completes")],
        entry=ENTRY,
        method="spawn",
        console=Console(file=io.StringIO()),
    ).run()
    assert [run.status for run in result.runs] == [Status.COMPLETED]
    assert not temporary.exists()
    assert not half.exists()


def test_a_launcher_killed_after_a_seal_leaves_nothing_for_good(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "sweep")
    folder = sweep.run("completes")

    def again() -> SweepResult:
        output = Console(file=io.StringIO())
        specs = [spec_named("completes")]
        return Launcher(sweep, MACHINE, specs, entry=ENTRY, method="spawn", console=output).run()

    assert [run.status for run in again().runs] == [Status.COMPLETED]
    record = {path: path.read_bytes() for path in folder.path.iterdir()}
    checkpoint = folder.checkpoints / "1.pt"
    leftovers = [folder.lock, folder.lines("steps"), folder.outcome(0), checkpoint]
    for path in leftovers:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"of a launcher that was killed")
    assert [run.skipped for run in again().runs] == [True]
    assert {path: path.read_bytes() for path in folder.path.iterdir()} == record


@pytest.mark.slow
def test_ranks_that_a_launcher_left_are_waited_for(
    launch: Callable[..., Elsewhere], tmp_path: Path
) -> None:
    """Here a process that has inherited the lock of a run whose launcher is gone."""
    folder = SweepFolder(tmp_path / "sweep").run("completes")
    script = (
        "import subprocess, sys\nfrom pathlib import Path\n"
        "from batchscape.record.claims import CLAIMS\n"
        "from batchscape.record.folder import RunFolder\n"
        "claim = CLAIMS.claim(RunFolder(Path(sys.argv[1])))\n"
        "rank = subprocess.Popen(['/bin/sleep', '600'], stdout=subprocess.DEVNULL,\n"
        "                        pass_fds=claim.descriptors)\n"
        "print(rank.pid, flush=True)\n"
    )
    dead = subprocess.Popen(
        [sys.executable, "-c", script, str(folder.path)], stdout=subprocess.PIPE, text=True
    )
    printed, _ = dead.communicate()
    rank = int(printed)
    try:
        assert is_alive(rank)
        launcher = launch("spawn", "completes")
        waits = f"Waiting for 1 run of another launcher (process {dead.pid} on"
        wait_until(lambda: waits in launcher.printed, "nothing is waited for")
        assert RunStatus.read(folder.status).attempts == []
        assert CLAIMS.claim(folder) is None
    finally:
        os.kill(rank, 9)
    assert launcher.process.wait() == 0
    assert [a.status for a in launcher.status("completes").attempts] == ["completed"]
