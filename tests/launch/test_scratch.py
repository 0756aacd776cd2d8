from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from batchscape.launch.scratch import scratch_folder

HOLDS = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from batchscape.launch.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "run").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


def held_by_another() -> tuple[subprocess.Popen[str], Path]:
    arguments = [sys.executable, "-c", HOLDS, tempfile.gettempdir()]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_it_is_there_and_then_gone() -> None:
    with scratch_folder() as folder:
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o777 == 0o700
        with scratch_folder() as other:
            assert other != folder
            assert folder.is_dir()
    assert not list(Path(tempfile.gettempdir()).glob("*batchscape-scratch-*"))


def test_what_a_killed_launcher_left_is_removed_and_what_is_in_use_is_not() -> None:
    dead, abandoned = held_by_another()
    alive, occupied = held_by_another()
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    assert (abandoned / "run").exists()
    with scratch_folder():
        assert not abandoned.exists()
        assert (occupied / "run").exists()
        alive.kill()
        alive.communicate()
    assert not occupied.exists()
