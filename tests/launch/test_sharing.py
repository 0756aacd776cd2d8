"""Several launchers on one sweep folder: every run is done once, whoever of them dies."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from launchers import Elsewhere
from rich.console import Console
from sweeps_of_fakes import ENTRY, MACHINE, is_alive, pids_in, spec_named, wait_until

from batchscape.launch import remaining as own_claims
from batchscape.launch.launcher import Launcher
from batchscape.launch.remaining import RemainingRuns
from batchscape.record import claims
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.locks import Lock, is_held
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import verify_seal

Launch = Callable[..., Elsewhere]


def wait_for_begun(sweep: SweepFolder, count: int) -> None:
    """Wait until ranks of `count` runs are at work."""
    wait_until(lambda: len(pids_in(sweep.path)) >= count, "the runs do not start")


def open_gate(sweep: SweepFolder) -> None:
    (sweep.path / "go").touch()


def assert_done_once(sweep: SweepFolder, names: list[str]) -> None:
    for name in names:
        folder = sweep.run(name)
        status = RunStatus.read(folder.status)
        assert [attempt.status for attempt in status.attempts] == ["completed"], name
        assert status.seal
        verify_seal(folder, status)
        assert not folder.lock.exists()


def started_by(launcher: Elsewhere) -> list[str]:
    lines = launcher.printed.splitlines()
    return [line.split()[1] for line in lines if " started (" in line]


def test_looking_at_what_others_have_takes_a_small_part_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of its own, on which each look at a run takes 2 ms."""
    clock = 100.0
    looked_at: list[tuple[str, float]] = []

    class Slow:
        def holder(self, run: RunFolder) -> str:
            nonlocal clock
            clock += 0.002
            looked_at.append((run.path.name, clock))
            return "another"

    monkeypatch.setattr(own_claims, "CLAIMS", Slow())
    monkeypatch.setattr(own_claims.time, "monotonic", lambda: clock)
    sweep, share, rarest = SweepFolder(tmp_path), {}, {}
    for runs in (1, 1000):
        runs_of_others = RemainingRuns([], sweep, ())
        assert all(runs_of_others.is_claimed_by_other(spec_named(f"run-{n}")) for n in range(runs))
        looked_at.clear()
        end = clock + 400
        while clock < end:  # as the launcher does that has nothing else to do
            assert list(runs_of_others.due()) == []
            assert runs_of_others.waits_for_others
            assert f"Waiting for {runs} run" in runs_of_others.describe_waiting()
            clock += 0.3
        times = [at for name, at in looked_at if name == "run-0"]
        rarest[runs] = max(after - before for before, after in pairwise(times))
        share[runs] = 0.002 * len(looked_at) / 400
    # Looks are 1.2 s apart here. Of a thousand runs 26 are looked at each time, in turn.
    assert share == {
        1: pytest.approx(0.0017, abs=1e-4),
        1000: pytest.approx(0.052 / 1.25, rel=0.02),
    }
    assert rarest == {
        1: pytest.approx(1.2, abs=0.1),
        1000: pytest.approx(1000 / 26 * 1.25, rel=0.05),
    }


@pytest.mark.slow
def test_two_launchers_share_the_runs(launch: Launch) -> None:
    names = ["gated-1", "gated-2", "completes-3-later", "completes-4-later"]
    one = launch("spawn", *names)
    wait_for_begun(one.sweep, 1)
    two = launch("spawn", *names)
    # The run that the first one has is left to it.
    wait_for_begun(one.sweep, 2)
    assert is_held(one.sweep.lock)
    open_gate(one.sweep)
    assert one.process.wait() == 0
    assert two.process.wait() == 0
    assert_done_once(one.sweep, names)
    assert sorted(started_by(one) + started_by(two)) == sorted(names)
    assert started_by(one)
    assert started_by(two)
    for launcher in (one, two):
        assert "4 runs: 4 completed" in launcher.printed
        elsewhere = {*names} - {*started_by(launcher)}
        for name in elsewhere:
            assert f"{name} completed: by another launcher" in launcher.printed or (
                "done already" in launcher.printed
            )
    assert not is_held(one.sweep.lock)


@pytest.mark.slow
def test_what_a_killed_launcher_had_is_taken_over(launch: Launch) -> None:
    names = ["gated-1", "completes-2-later"]
    one = launch("spawn", *names)
    ranks = one.wait_for_pids("gated-1", 1)
    two = launch("spawn", *names)
    waits = f"Waiting for 1 run of another launcher (process {one.process.pid} on"
    wait_until(lambda: waits in two.printed, "the second launcher does not wait")
    assert two.process.poll() is None
    one.end()
    wait_until(lambda: "gated-1 started" in two.printed, "the run is not taken over")
    # Begun only once nobody was left.
    assert not any(map(is_alive, ranks.values()))
    open_gate(one.sweep)
    assert two.process.wait() == 0
    attempts = two.status("gated-1").attempts
    assert [(a.status, a.reason) for a in attempts] == [
        ("interrupted", "the launcher died"),
        ("completed", None),
    ]
    assert_done_once(one.sweep, ["completes-2-later"])


@pytest.mark.parametrize("is_over", [False, True])
def test_who_lost_a_run_writes_no_end(tmp_path: Path, is_over: bool) -> None:
    """However short before: another launcher took it over, and may have done it by now."""
    sweep = SweepFolder(tmp_path / "sweep")
    run = sweep.run("gated-1")

    def take_over() -> bytes:
        wait_for_begun(sweep, 1)
        wait_until(lambda: RunStatus.read(run.status).status is Status.RUNNING, "it is not begun")
        number, last = claims._last_claim(run)
        assert isinstance(last, claims._Holder)
        holder = replace(last, mark="another", has_lock=False)
        assert claims._follow(run, number, last, holder)
        status = RunStatus.read(run.status)
        status.reason = "the other one's"
        status.write(run.status)
        if is_over:
            lock = Lock(run.lock, os.open(run.lock, os.O_RDWR), keeps_out=False)
            claims.RunClaim(run, number + 1, holder, lock).release(is_over=True)
        written = run.status.read_bytes()
        open_gate(sweep)
        return written

    with ThreadPoolExecutor() as other:
        written = other.submit(take_over)
        result = Launcher(
            sweep,
            MACHINE,
            [spec_named("gated-1")],
            entry=ENTRY,
            method="spawn",
            console=Console(file=io.StringIO()),
        ).run()
    assert run.status.read_bytes() == written.result()
    (loser,) = result.runs
    assert (loser.status, loser.by_another) == (Status.INTERRUPTED, True)
    assert run.lines("steps").exists(), "nothing is cleared away"
