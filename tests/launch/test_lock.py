"""Locks that end with their holders, and with those who have inherited them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from sweeps_of_fakes import wait_until

from batchscape.errors import LaunchError
from batchscape.launch.lock import run_lock, sweep_lock
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import Lock, exclusively, holder, is_held, take

HOLDS = """
import sys, time
from pathlib import Path
from batchscape.record.locks import take
lock = take(Path(sys.argv[1]), shared=sys.argv[2] == "shared")
if lock is None:
    sys.exit("refused")
lock.sign()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".lock"


@contextmanager
def held_elsewhere(path: Path, kind: str = "exclusive") -> Iterator[int]:
    """Have another process hold a lock; it is killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path), kind], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def taken(path: Path, *, shared: bool = False) -> Lock:
    lock = take(path, shared=shared)
    assert lock is not None
    return lock


def test_one_holder_at_a_time_until_it_is_killed(path: Path) -> None:
    assert not is_held(path)
    assert holder(path) is None
    with held_elsewhere(path) as pid:
        assert take(path) is None
        assert take(path, shared=True) is None
        assert is_held(path)
        assert holder(path) == pid
    assert not is_held(path)
    taken(path).release()


def test_a_shared_lock_keeps_out_only_those_who_want_it_alone(path: Path) -> None:
    with held_elsewhere(path, "shared"):
        lock = taken(path, shared=True)
        assert take(path) is None
        lock.release()
        assert is_held(path)
    assert not is_held(path)


def test_a_lock_lasts_as_long_as_those_who_inherit_it(path: Path) -> None:
    lock = taken(path)
    heir = subprocess.Popen(["/bin/sleep", "600"], pass_fds=[lock.descriptor])
    # As the death of its holder does it, which unlocks nothing by itself.
    os.close(lock.descriptor)
    assert is_held(path)
    os.kill(heir.pid, signal.SIGKILL)
    heir.wait()
    assert not is_held(path)


def test_release_does_not_wait_for_heirs(path: Path) -> None:
    lock = taken(path)
    heir = subprocess.Popen(["/bin/sleep", "600"], pass_fds=[lock.descriptor])
    lock.release()
    assert not is_held(path)
    heir.kill()
    heir.wait()


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


def test_asking_disturbs_the_next_holder_for_a_moment_only(path: Path) -> None:
    """The one who asks takes the lock; patience outlasts that."""
    asker = taken(path)
    with ThreadPoolExecutor() as beside:
        patient = beside.submit(take, path, patience_s=30.0)
        assert take(path, patience_s=0.2) is None
        assert not patient.done()
        asker.release()
        lock = patient.result()
    assert lock is not None
    lock.release()


def test_short_turns_are_taken_one_after_the_other(path: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from batchscape.record.locks import exclusively\n"
        "counter = Path(sys.argv[2])\n"
        "for _ in range(50):\n"
        "    with exclusively(Path(sys.argv[1])):\n"
        "        counter.write_text(str(int(counter.read_text()) + 1))\n"
    )
    counter = tmp_path / "counter"
    counter.write_text("0")
    adders = [
        subprocess.Popen([sys.executable, "-c", script, str(path), str(counter)]) for _ in range(3)
    ]
    assert [adder.wait(60) for adder in adders] == [0, 0, 0]
    assert counter.read_text() == "150"
    with exclusively(tmp_path / "new" / ".lock"):
        assert is_held(tmp_path / "new" / ".lock")
    assert not is_held(tmp_path / "new" / ".lock")


def test_launchers_share_a_sweep_and_not_a_run(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "sweep")
    with sweep_lock(sweep), sweep_lock(sweep):
        assert is_held(sweep.lock)
        lock = run_lock(sweep.run("a"))
        assert lock is not None
        assert run_lock(sweep.run("a")) is None
        assert holder(sweep.run("a").lock) == os.getpid()
        other = run_lock(sweep.run("b"))
        assert other is not None
        lock.release(remove=True)
        other.release()
    assert not is_held(sweep.lock)
    assert not sweep.run("a").lock.exists()


def test_a_sweep_that_something_else_locks_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchscape.launch.lock._PATIENCE_S", 0.1)
    sweep = SweepFolder(tmp_path / "sweep")
    sweep.path.mkdir()
    with (
        held_elsewhere(sweep.lock),
        pytest.raises(LaunchError, match="held by a program that is no launcher"),
        sweep_lock(sweep),
    ):
        pass


def test_what_cannot_be_locked_is_a_message(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "sweep")
    sweep.run("a").lock.mkdir(parents=True)
    with pytest.raises(LaunchError, match=r"cannot be locked .*file system with locks"):
        run_lock(sweep.run("a"))
    wait_until(lambda: not is_held(sweep.lock), "a lock is left")


def test_a_lock_that_was_moved_leaves_its_successor_alone(tmp_path: Path) -> None:
    """A damaged folder is set aside with its lock; another launcher may begin the run anew."""
    folder = SweepFolder(tmp_path / "sweep").run("a")
    folder.path.mkdir(parents=True)
    moved = taken(folder.lock)
    folder.path.rename(tmp_path / "aside")
    other = run_lock(folder)
    assert other is not None
    moved.release(remove=True)
    assert is_held(folder.lock)
    assert run_lock(folder) is None
    other.release(remove=True)
    assert not folder.lock.exists()


def test_a_lock_that_cannot_be_signed_is_held_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is for messages; what is not released by name would be held until the end."""

    def fail(_lock: Lock) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Lock, "sign", fail)
    folder = SweepFolder(tmp_path / "sweep").run("a")
    lock = run_lock(folder)
    assert lock is not None
    assert is_held(folder.lock)
    lock.release(remove=True)
    assert not is_held(folder.lock)
