"""Clocks of the wall that are set back or ahead while a sweep runs; the only faked thing here."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from sweeps_of_fakes import MACHINE, spec_named

from batchscape.launch.launcher import Launcher
from batchscape.record import instants
from batchscape.record.folder import SweepFolder
from batchscape.record.overview import overview
from batchscape.record.status import RunStatus

DAY_S = 86400.0
REAL = time.time


@pytest.fixture(params=[-30 * DAY_S, 30 * DAY_S], ids=["back", "ahead"])
def jump_s(request: pytest.FixtureRequest) -> float:
    return float(request.param)


def sweep_of(path: Path, *names: str) -> dict[str, RunStatus]:
    sweep = SweepFolder(path)
    specs = [spec_named(name, retry=["failed"]) for name in names]
    console = Console(file=io.StringIO())
    Launcher(
        sweep, MACHINE, specs, console=console, entry="clock_workers:main", method="spawn"
    ).run()
    return {name: RunStatus.read(sweep.run(name).status) for name in names}


def test_the_first_cause_is_found_whatever_the_clocks_of_ranks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """The clock jumps in the rank that fails first: before or after its peer by a month."""
    monkeypatch.setenv("JUMP_S", repr(jump_s))
    (status,) = sweep_of(tmp_path, "consequence-d2").values()
    assert (status.rank, status.reason) == (0, "the cause")


def test_attempts_follow_each_other_and_take_no_negative_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """The clock of the launcher jumps from each reading to the next."""
    readings = [0]

    def jumping() -> float:
        readings[0] += 1
        return REAL() + jump_s * readings[0]

    monkeypatch.setattr(time, "time", jumping)
    for _ in range(3):
        (status,) = sweep_of(tmp_path, "fails").values()
        (progress,) = overview(SweepFolder(tmp_path)).runs
        assert progress.age_s is None or progress.age_s >= 0
    times = [(attempt.started_at, attempt.ended_at) for attempt in status.attempts]
    assert len(times) >= 3
    edges = [edge for pair in times for edge in pair]
    assert None not in edges
    assert edges == sorted(edges)
    assert all(ended - started < 60 for started, ended in times)


def test_an_attempt_of_a_dead_launcher_ends_after_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (status,) = sweep_of(tmp_path, "fails").values()
    folder = SweepFolder(tmp_path).run("fails")
    last = status.attempts[-1]
    last.ended_at = last.status = None
    status.status = "running"
    # Of a launcher that started while the clock of the wall was behind.
    monkeypatch.setattr(instants, "_OFFSET_S", instants._OFFSET_S - DAY_S)
    status.write(folder.status)
    monkeypatch.undo()
    (status,) = sweep_of(tmp_path, "fails").values()
    lost, new = status.attempts[-2:]
    assert lost.started_at <= lost.ended_at <= new.started_at <= new.ended_at


def test_processes_of_a_launch_share_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that starts under another clock has the time of the launcher."""
    code = (
        "import time; real = time.time; time.time = lambda: real() + 1e6; "
        "from batchscape.record.instants import now; print(now())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    before = instants.now()
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True
    )
    assert before <= float(process.stdout) <= instants.now()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert abs(instants.now() - REAL()) < DAY_S
