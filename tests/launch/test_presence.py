"""Two launchers on one machine notice each other, whatever folders they work in."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweeps_of_fakes import ENTRY, MACHINE, spec_named

from batchscape.launch.devices import Presence
from batchscape.launch.launcher import Launcher
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder

ELSEWHERE = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from batchscape.launch.devices import Presence
with Presence():
    print("here", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder() -> Path:
    return Path(tempfile.gettempdir()) / "batchscape-launchers"


def launched(path: Path, name: str) -> dict[str, Any]:
    sweep = SweepFolder(path)
    console = Console(file=io.StringIO())
    result = Launcher(
        sweep, MACHINE, [spec_named(name)], entry=ENTRY, method="spawn", console=console
    ).run()
    assert result.failed == ()
    record = read_json(sweep.run(name).launch)
    return {key: record[key] for key in ("timing_valid", "timing_invalid_reason")}


SPOILED = {
    "timing_valid": False,
    "timing_invalid_reason": "another launcher was at work on this machine",
}


def test_each_finds_the_other(folder: Path) -> None:
    with Presence() as one:
        assert not one.has_others()
        with Presence() as two:
            assert one.has_others()
            assert two.has_others()
        assert not one.has_others()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert list(folder.iterdir()) == []


def test_an_answer_may_be_old() -> None:
    with Presence() as one:
        assert not one.has_others()
        with Presence():
            assert not one.has_others(max_age_s=600.0)
            assert one.has_others()
        assert one.has_others(max_age_s=600.0)


def test_a_killed_launcher_is_forgotten(folder: Path) -> None:
    command = [sys.executable, "-c", ELSEWHERE, tempfile.gettempdir()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"here\n"
        with Presence() as one:
            assert one.has_others()
            other.kill()
            other.wait()
            assert not one.has_others()
            assert len(list(folder.iterdir())) == 1


def test_foreign_things_in_the_folder_do_no_harm(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (folder / "a folder").mkdir()
    os.mkfifo(folder / "pipe")
    (tmp_path / "target").touch()
    (folder / "link").symlink_to(tmp_path / "target")
    with Presence() as one:
        assert not one.has_others()
    assert (tmp_path / "target").exists()


def test_without_the_folder_it_goes_on(folder: Path, tmp_path: Path) -> None:
    folder.write_text("a file in its place")
    assert launched(tmp_path / "sweep", "completes")["timing_valid"]


def test_times_beside_another_launcher_are_not_valid(tmp_path: Path) -> None:
    with Presence():
        assert launched(tmp_path / "one", "completes") == SPOILED
    # A launcher with nothing to run has disturbed nobody, and alone the next one is undisturbed.
    assert launched(tmp_path / "two", "completes")["timing_valid"]


@pytest.mark.slow
def test_one_that_comes_in_the_middle_is_noticed(tmp_path: Path) -> None:
    """Neither the start nor the end of the run would show it."""
    # Its own sweep waits for the run to begin, and ends before it.
    command = [sys.executable, "-c", COMES_AND_GOES, tempfile.gettempdir(), str(tmp_path / "one")]
    with subprocess.Popen(command) as other:
        assert launched(tmp_path / "one", "meets") == SPOILED
        assert other.wait() == 0


COMES_AND_GOES = """
import json, sys, tempfile, time
from pathlib import Path
tempfile.tempdir = sys.argv[1]
from batchscape.launch.devices import Presence
run = Path(sys.argv[2]) / "runs" / "meets"
while not list(run.glob("pid-*.json")):
    time.sleep(0.02)
with Presence():
    while json.loads((run / "launch.json").read_text())["timing_valid"]:
        time.sleep(0.02)
"""


def test_a_launcher_that_waits_hides_and_shows_itself_again():
    with Presence() as waiting, Presence() as working:
        assert working.has_others()
        waiting.hide()
        waiting.hide()
        assert not working.has_others()
        assert waiting.has_others()
        waiting.show()
        assert working.has_others()
        working.hide()
        assert not waiting.has_others()
