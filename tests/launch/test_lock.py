"""Locks and claims end with their holders, and with those who have inherited them."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchscape.record.claims import CLAIMS, RunClaim
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.locks import Lock, hold, is_held, sweep_lock, take

HOLDS = """
import sys, time
from pathlib import Path
from batchscape.record.claims import CLAIMS
from batchscape.record.folder import RunFolder
claim = CLAIMS.claim(RunFolder(Path(sys.argv[1])))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[int]:
    """Have another process claim a run; it is killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def taken(path: Path) -> Lock:
    lock = take(path)
    assert lock is not None
    return lock


def claimed(run: RunFolder) -> RunClaim:
    claim = CLAIMS.claim(run)
    assert claim is not None
    return claim


def test_one_launcher_has_a_run_until_it_is_killed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert CLAIMS.holder(run) is None
    with held_elsewhere(run.path) as pid:
        assert CLAIMS.claim(run) is None
        assert CLAIMS.holder(run) == f"process {pid} on {platform.node()}"
    # It is there to be taken over.
    assert CLAIMS.holder(run) is None
    claim = claimed(run)
    claim.renew()
    assert CLAIMS.holder(run) == f"process {os.getpid()} on {platform.node()}"
    claim.release()
    assert CLAIMS.holder(run) is None


def test_a_claim_lasts_as_long_as_the_ranks_that_inherit_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    claim = claimed(run)
    with subprocess.Popen(["/bin/sleep", "600"], pass_fds=claim.descriptors) as rank:
        # As the death of its holder does it, which gives nothing up by itself.
        for descriptor in claim.descriptors:
            os.close(descriptor)
        assert CLAIMS.claim(run) is None
        assert CLAIMS.holder(run) == f"process {os.getpid()} on {platform.node()}"
        rank.kill()
        rank.wait()
        claimed(run).release()


def test_a_removed_lock_is_no_lock(path: Path) -> None:
    """Whoever waits at a file that is removed must not think that it has the lock."""
    first = taken(path)
    first.release(remove=True)
    assert not path.exists()
    second = taken(path)
    assert take(path) is None
    # A lock on the old file, which has no name any more, says nothing about the new one.
    path.unlink()
    third = taken(path)
    assert os.fstat(second.descriptor).st_ino != os.fstat(third.descriptor).st_ino
    second.release()
    assert is_held(path)
    third.release()


def test_short_turns_are_taken_one_after_the_other(path: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from batchscape.record.locks import hold\n"
        "counter = Path(sys.argv[2])\n"
        "for _ in range(50):\n"
        "    with hold(Path(sys.argv[1])):\n"
        "        counter.write_text(str(int(counter.read_text()) + 1))\n"
    )
    counter = tmp_path / "counter"
    counter.write_text("0")
    adders = [
        subprocess.Popen([sys.executable, "-c", script, str(path), str(counter)]) for _ in range(3)
    ]
    assert [adder.wait() for adder in adders] == [0, 0, 0]
    assert counter.read_text() == "150"
    with hold(tmp_path / "new" / ".lock"):
        assert is_held(tmp_path / "new" / ".lock")
    assert not is_held(tmp_path / "new" / ".lock")


def test_without_locks_a_sweep_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = SweepFolder(tmp_path / "sweep")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with sweep_lock(sweep):
        assert not is_held(sweep.lock)
        claim = claimed(sweep.run("a"))
        assert claim.descriptors == ()
        assert CLAIMS.claim(sweep.run("a")) is None
        assert CLAIMS.holder(sweep.run("a")) == f"process {os.getpid()} on {platform.node()}"
        claim.release()
        assert CLAIMS.holder(sweep.run("a")) is None
        claimed(sweep.run("a")).release(is_over=True)
        assert not list(sweep.run("a").path.iterdir())


def test_a_claim_that_was_moved_leaves_its_successor_alone(tmp_path: Path) -> None:
    """Somebody moves the folder of a run away; another launcher may begin the run anew."""
    folder = SweepFolder(tmp_path / "sweep").run("a")
    moved = claimed(folder)
    folder.path.rename(tmp_path / "aside")
    other = claimed(folder)
    moved.release(is_over=True)
    assert CLAIMS.claim(folder) is None
    other.release(is_over=True)
    assert not folder.lock.exists()
