"""A launcher on a real terminal, which it leaves as it has found it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweeps_of_fakes import is_alive, pids_in, wait_until

from batchscape.record.folder import SweepFolder
from batchscape.record.locks import is_held
from batchscape.record.status import RunStatus, Status

pytestmark = pytest.mark.usefixtures("heeded_signals")

HERE = Path(__file__).parent
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
CTRL_C = b"\x03"


class OnTerminal:
    """A launcher whose terminal is held by the test."""

    def __init__(self, sweep: Path, *names: str) -> None:
        self.sweep = SweepFolder(sweep)
        self.shown = b""
        self._master, self._slave = pty.openpty()
        self.before = termios.tcgetattr(self._slave)
        launcher = [sys.executable, str(HERE / "launch_elsewhere.py"), str(sweep), "spawn"]
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(HERE / "on_a_terminal.py"),
                os.ttyname(self._slave),
                *launcher,
                *names,
            ],
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def shows(self, text: bytes) -> bool:
        """Read what there is to read; whether `text` was shown by now."""
        while self._master >= 0 and select.select([self._master], [], [], 0.02)[0]:
            self.shown += os.read(self._master, 1 << 16)
        return text in self.shown

    def end(self) -> int:
        """Wait for the end, reading on: a full terminal would block the launcher."""
        deadline = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline:
            self.shows(b"")
        self.shows(b"")
        return self.process.wait(0)

    def hang_up(self) -> None:
        """Close the terminal's window."""
        for end in (self._master, self._slave):
            os.close(end)
        self._master = -1

    @property
    def attributes(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self._master >= 0:
            self.hang_up()


@pytest.fixture
def terminals() -> Iterator[list[OnTerminal]]:
    opened: list[OnTerminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def begun(terminals: list[OnTerminal], sweep: Path, *names: str) -> OnTerminal:
    terminal = OnTerminal(sweep, *names)
    terminals.append(terminal)
    folder = terminal.sweep.run(names[0]).path
    wait_until(lambda: terminal.shows(HIDE) and len(pids_in(folder)) > 0, "nothing is drawn")
    return terminal


def assert_left_alone(terminal: OnTerminal, pids: dict[str, int]) -> None:
    assert not any(map(is_alive, pids.values()))
    assert not is_held(terminal.sweep.lock)
    for folder in terminal.sweep.run_folders():
        assert not is_held(folder.lock)


@pytest.mark.slow
def test_ctrl_c_waits_for_checkpoints_and_restores_the_terminal(
    tmp_path: Path, terminals: list[OnTerminal]
) -> None:
    terminal = begun(terminals, tmp_path / "sweep", "polite", "completes-later")
    pids = pids_in(terminal.sweep.path)
    terminal.press(CTRL_C)
    assert terminal.end() == 130
    assert terminal.shows(b"stopped by SIGINT: waiting up to")
    assert terminal.shows(b"Stopped before the end; the same command goes on")
    assert not terminal.shows(b"Traceback")
    assert terminal.shown.rindex(SHOW) > terminal.shown.rindex(HIDE)
    assert terminal.attributes == terminal.before
    status = RunStatus.read(terminal.sweep.run("polite").status)
    assert (status.status, status.reason) == (Status.INTERRUPTED, "stopped by SIGINT")
    assert_left_alone(terminal, pids)


@pytest.mark.slow
def test_a_second_ctrl_c_kills_and_restores_the_terminal(
    tmp_path: Path, terminals: list[OnTerminal]
) -> None:
    terminal = begun(terminals, tmp_path / "sweep", "stubborn")
    wait_until(lambda: len(pids_in(terminal.sweep.path)) == 2, "its processes do not start")
    pids = pids_in(terminal.sweep.path)
    terminal.press(CTRL_C)
    wait_until(lambda: terminal.shows(b"once more kills"), "the signal is not seen")
    assert all(map(is_alive, pids.values()))
    terminal.press(CTRL_C)
    assert terminal.end() == 130
    assert terminal.shown.rindex(SHOW) > terminal.shown.rindex(HIDE)
    assert terminal.attributes == terminal.before
    wait_until(lambda: not any(map(is_alive, pids.values())), "processes are left")
    assert RunStatus.read(terminal.sweep.run("stubborn").status).status is Status.INTERRUPTED
    assert_left_alone(terminal, pids)


@pytest.mark.slow
def test_a_closed_terminal_lets_runs_stop_in_order(
    tmp_path: Path, terminals: list[OnTerminal]
) -> None:
    """What cannot be shown any more must not end what is being done."""
    terminal = begun(terminals, tmp_path / "sweep", "polite")
    pids = pids_in(terminal.sweep.path)
    terminal.hang_up()
    terminal.process.wait()
    status = RunStatus.read(terminal.sweep.run("polite").status)
    assert (status.status, status.reason) == (Status.INTERRUPTED, "stopped by SIGHUP")
    assert_left_alone(terminal, pids)


@pytest.mark.slow
def test_a_pipe_that_closes_ends_no_run(tmp_path: Path) -> None:
    """As in `batchscape sweep ... | head -1`."""
    sweep = SweepFolder(tmp_path / "sweep")
    names = ["gated-1", "completes-later"]
    command = [sys.executable, str(HERE / "launch_elsewhere.py"), str(sweep.path), "spawn", *names]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert launcher.stdout is not None
    assert b"gated-1 started" in launcher.stdout.readline()
    launcher.stdout.close()
    (sweep.path / "go").touch()
    launcher.wait()
    for name in names:
        assert RunStatus.read(sweep.run(name).status).status is Status.COMPLETED
