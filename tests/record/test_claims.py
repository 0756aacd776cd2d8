"""Claims without locks, as launchers on several nodes make them."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from batchscape.record import claims
from batchscape.record.claims import CLAIMS, RunClaims
from batchscape.record.folder import RunFolder
from batchscape.record.locks import Lock

CLAIMING = Path(__file__).with_name("claiming.py")


def start(
    folder: Path, node: str, runs: int, seconds: float, *before: str
) -> subprocess.Popen[bytes]:
    command = [*before, sys.executable, str(CLAIMING), str(folder), node, str(runs), str(seconds)]
    return subprocess.Popen(command, start_new_session=True)


def check(notes: str, killed: dict[str, int]) -> tuple[int, int]:
    """Check that nobody begins a run that somebody at work has; return begun and taken over."""
    at_work: dict[str, str] = {}
    begun = taken = 0
    for line in sorted(notes.splitlines(), key=lambda line: int(line.split()[0])):
        at, what, run, who = line.split()
        if what == "begin":
            begun += 1
            before = at_work.get(run)
            if before is not None:
                assert before in killed, f"{who} began {run}, which {before} had"
                assert int(at) > killed[before], f"{who} began {run} before {before} was killed"
                taken += 1
            at_work[run] = who
        else:
            assert what == "end", line
            assert at_work.pop(run) == who
    return begun, taken


@pytest.mark.slow
def test_many_launchers_without_locks_some_of_them_killed(tmp_path: Path) -> None:
    rng, nodes = random.Random(0), 6
    living = [start(tmp_path, f"node{n}", 4, 14.0) for n in range(nodes)]
    killed: dict[str, int] = {}
    end = time.monotonic() + 9
    while time.monotonic() < end:
        time.sleep(rng.uniform(0.3, 1.0))
        victim = living.pop(rng.randrange(len(living)))
        victim.kill()
        victim.wait()
        killed[f"{victim.args[-3]}.{victim.pid}"] = time.monotonic_ns()  # type: ignore[index]
        nodes += 1
        living.append(start(tmp_path, f"node{nodes}", 4, end - time.monotonic() + 5))
    for process in living:
        assert process.wait() == 0
    begun, taken = check((tmp_path / "notes").read_text(), killed)
    print(f"{begun} claims, {len(killed)} kills, {taken} runs taken over")
    assert begun > 50
    assert taken > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("faketime") is None, reason="needs the Debian package faketime")
def test_clocks_that_differ_by_a_minute(tmp_path: Path) -> None:
    living = [
        start(tmp_path, "early", 2, 6.0, "faketime", "-f", "-60s"),
        start(tmp_path, "right", 2, 6.0),
        start(tmp_path, "late", 2, 6.0, "faketime", "-f", "+60s"),
    ]
    for process in living:
        assert process.wait() == 0
    # libfaketime moves the monotonic clock, too: begun and ended are told by their order alone.
    at_work: dict[str, str] = {}
    who_began = set()
    for line in (tmp_path / "notes").read_text().splitlines():
        _, what, run, who = line.split()
        if what == "begin":
            assert run not in at_work
            at_work[run] = who
            who_began.add(who.split(".")[0])
        else:
            assert (what, at_work.pop(run)) == ("end", who)
    assert who_began == {"early", "right", "late"}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that a launcher in job 7, on another machine, has claimed and left without a word."""
    run = RunFolder(tmp_path / "runs" / "a")
    for name, value in {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1"}.items():
        monkeypatch.setenv(name, value)
    claim = CLAIMS.claim(run)
    assert claim is not None
    for descriptor in claim.descriptors:
        os.close(descriptor)
    for name in ("SLURM_JOB_ID", "SLURMD_NODENAME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(claims, "is_of_this_machine", lambda _: False)
    return run


def look(observer: RunClaims, run: RunFolder, seconds: float) -> object:
    end = time.monotonic() + seconds
    while time.monotonic() < end and (claim := observer.claim(run)) is None:
        time.sleep(0.02)
    return claim


def test_a_claim_is_left_after_silence(
    elsewhere: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_SILENT_S", 0.5)
    observer = RunClaims()
    assert observer.claim(elsewhere) is None  # not at the first sight
    assert look(observer, elsewhere, 2.0) is not None


def test_who_has_a_run_is_told_at_a_glance(elsewhere: RunFolder) -> None:
    """A claim that was not touched for two minutes is nobody's; whoever claims it looks longer."""
    assert CLAIMS.holder(elsewhere) == f"process {os.getpid()} on node1 (job 7)"
    long_ago = time.time() - 121
    os.utime(elsewhere.path / ".claim.1", (long_ago, long_ago))
    assert CLAIMS.holder(elsewhere) is None
    assert RunClaims().claim(elsewhere) is None


def test_on_the_only_machine_the_end_of_the_lock_is_the_end_of_the_claim(
    elsewhere: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "is_of_this_machine", lambda _: True)
    assert CLAIMS.holder(elsewhere) is None
    assert CLAIMS.claim(elsewhere) is not None


def test_looks_at_other_runs_count(elsewhere: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: who looks at a thousand runs comes to each one rarely."""
    clock = 0.0
    monkeypatch.setattr(claims.time, "monotonic", lambda: clock)
    other = RunFolder(elsewhere.path.with_name("other"))
    shutil.copytree(elsewhere.path, other.path)
    observer = RunClaims()
    for _ in range(2):
        assert observer.claim(elsewhere) is None
        for _ in range(119):
            clock += 1.0
            os.utime(other.path / ".claim.1", ns=(0, int(clock * 1e9)))
            assert observer.claim(other) is None
        clock += 0.5
    clock += 1.0
    assert observer.claim(elsewhere) is not None


def test_a_holder_that_touches_its_claim_keeps_its_run(
    elsewhere: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_SILENT_S", 1.0)
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            os.utime(elsewhere.path / ".claim.1")

    thread = threading.Thread(target=beat)
    thread.start()
    observer = RunClaims()
    assert look(observer, elsewhere, 2.5) is None
    over.set()
    thread.join()
    assert look(observer, elsewhere, 5.0) is not None


def test_time_in_which_nobody_looked_is_no_silence(
    elsewhere: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_SILENT_S", 1.0)
    monkeypatch.setattr(claims, "_GAP_S", 0.2)
    observer = RunClaims()
    for _ in range(2):
        assert observer.claim(elsewhere) is None
        time.sleep(1.2)
    assert observer.claim(elsewhere) is None


def test_who_was_taken_over_sees_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    claim = CLAIMS.claim(run)
    assert claim is not None
    assert claim.renew()
    assert claim.renew(at_once=True)
    holder = claims._read(run.path / ".claim.1")
    assert isinstance(holder, claims._Holder)
    assert claims._follow(run, 1, holder, replace(holder, mark="another"))
    assert not claim.renew(at_once=True)
    claim.release(is_over=True)
    assert claims._last_claim(run)[0] == 2  # the other one's stays


def test_of_two_who_found_the_same_one_has_the_run(tmp_path: Path) -> None:
    """Both saw that nobody holds it; the second finds the claim of the first in its place."""
    run = RunFolder(tmp_path / "a")
    run.path.mkdir()
    first = claims._Holder.here(has_lock=False)
    second = replace(first, mark="another")
    assert claims._follow(run, 0, None, first)
    assert not claims._follow(run, 0, None, second)
    assert claims._last_claim(run) == (1, first)


def test_who_was_taken_over_sees_it_after_the_run_is_over(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    claim = CLAIMS.claim(run)
    assert claim is not None
    run.status.touch()
    holder = claims._read(run.path / ".claim.1")
    assert isinstance(holder, claims._Holder)
    other = replace(holder, mark="another")
    assert claims._follow(run, 1, holder, other)
    assert claim.renew(), "it has just looked"
    assert not claim.renew(at_once=True)
    lock = Lock(run.lock, os.open(run.lock, os.O_RDWR), keeps_out=False)
    claims.RunClaim(run, 2, other, lock).release(is_over=True)
    assert not list(run.path.glob(".claim*"))
    assert not claim.renew(at_once=True)
    # Opened again meanwhile, as by `--retry`: the first claim there now is not its own.
    assert claims._follow(run, 0, None, other)
    assert not claim.renew(at_once=True)
    claim.release(is_over=True)
    assert claims._last_claim(run) == (1, other)


def test_a_folder_that_was_moved_takes_its_claim_along(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    claim = CLAIMS.claim(run)
    assert claim is not None
    run.status.touch()
    run.path.rename(tmp_path / "b")
    assert claim.renew(at_once=True)


def test_who_comes_so_late_that_the_run_is_over_withdraws(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    claim = CLAIMS.claim(run)
    assert claim is not None
    number, last = claims._last_claim(run)
    claim.release(is_over=True)
    assert isinstance(last, claims._Holder)
    assert not claims._follow(run, number, last, replace(last, mark="late"))
    assert list(run.path.iterdir()) == []
