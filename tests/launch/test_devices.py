"""Devices are one launcher's at a time: real processes that hold locks, and are killed."""

from __future__ import annotations

import io
import os
import random
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from launchers import Elsewhere
from placing import Placer
from rich.console import Console
from sweeps_of_fakes import ENTRY, is_alive, pids_in, spec_named, wait_until

from batchscape.cuda_devices import CudaDevice
from batchscape.launch import placement
from batchscape.launch.devices import DevicePool
from batchscape.launch.launcher import Launcher
from batchscape.plan.machine import Machine
from batchscape.record.claims import CLAIMS
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus, Status

HOLDER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from batchscape.launch.devices import DevicePool
kind, *devices = sys.argv[2:]
locks = DevicePool(kind, {device: device for device in devices}, print)
assert all([locks.take(device) for device in devices])
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(kind: str, *devices: str) -> Iterator[subprocess.Popen[bytes]]:
    """Have another process hold devices."""
    command = [sys.executable, "-c", HOLDER, tempfile.gettempdir(), kind, *devices]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def locks(kind: str = "cpu", count: int = 4) -> DevicePool:
    return DevicePool(kind, {i: str(i) for i in range(count)}, pytest.fail)


def test_a_device_is_held_until_it_is_given_back() -> None:
    one, two, other = locks(), locks(), locks("cuda")
    assert one.take(0)
    assert not two.take(0)
    assert two.take(1)
    assert other.take(0)
    one.give_back([0])
    assert two.take(0)
    assert len(set(two.descriptors([0, 1]))) == 2
    two.give_back([0, 1])
    other.give_back([0])
    # Another user may lock the files, and nobody else may remove them.
    for path in one.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE(one.folder.stat().st_mode) == 0o1777


def test_a_process_that_inherited_a_lock_does_not_keep_what_was_given_back() -> None:
    """Something that a rank left behind must not keep its own launcher waiting for ever."""
    one, two = locks(), locks()
    assert one.take(0)
    with subprocess.Popen(["/bin/sleep", "600"], pass_fds=one.descriptors([0])) as process:
        one.give_back([0])
        assert two.take(0)
        two.give_back([0])
        process.kill()


def test_a_killed_launcher_holds_nothing_and_its_ranks_hold_what_they_use() -> None:
    mine = locks()
    with held("cpu", "0") as other:
        assert not mine.take(0)
        other.kill()
        other.wait()
        assert mine.take(0)
        mine.give_back([0])
    held_by_rank = locks()
    assert held_by_rank.take(1)
    rank = subprocess.Popen(["/bin/sleep", "600"], pass_fds=held_by_rank.descriptors([1]))
    with rank:
        # The launcher's own end of it closes as a kill would close it.
        for descriptor in held_by_rank.descriptors([1]):
            os.close(descriptor)
        assert not mine.take(1)
        rank.kill()
        rank.wait()
        assert mine.take(1)
        mine.give_back([1])


def test_launchers_that_number_devices_otherwise_do_not_wait_for_each_other() -> None:
    """As with CUDA_VISIBLE_DEVICES=0,1 and 1,0: names decide what is kept, not numbers."""
    one = DevicePool("cuda", {0: "a", 1: "b"}, pytest.fail)
    two = DevicePool("cuda", {0: "b", 1: "a"}, pytest.fail)
    ran_one, ran_two = one.lease(1), two.lease(1)
    assert ran_one is not None
    assert ran_two is not None
    assert (one.lease(2), two.lease(2)) == (None, None)
    one.release(ran_one)
    two.release(ran_two)
    both = [pool.lease(2) for pool in (one, two, one, two)]
    assert sum(lease is not None for lease in both) == 1


@pytest.mark.parametrize("how", ["a file in its place", "no permission", "a pipe in its place"])
def test_without_a_usable_folder_it_is_said_once_and_nobody_waits(how: str) -> None:
    warnings: list[str] = []
    mine = DevicePool("cpu", {0: "0", 1: "1"}, warnings.append)
    if how == "a file in its place":
        mine.folder.write_text("")
    elif how == "no permission":
        mine.folder.parent.chmod(0o500)
        if os.geteuid() == 0:
            # Root may write there all the same; nobody can make a folder below a file.
            mine.folder.symlink_to("/dev/null/nowhere")
    else:
        mine.folder.mkdir()
        os.mkfifo(mine.folder / "cpu-0")
    assert [mine.take(0), mine.take(1)] == [True, True]
    mine.show_waiting(True)
    mine.show_waiting(False)
    mine.give_back([0, 1])
    if how == "a pipe in its place":
        # It can be locked like any file, and blocks nobody.
        assert warnings == []
    else:
        (warning,) = warnings
        assert re.match(r"devices cannot be locked in .*: launchers on this machine may", warning)


FOUR_CORES = Machine(4, "x")
FOUR = Machine(4, "x", tuple(CudaDevice(i, "GPU", (9, 0), f"GPU-{i}") for i in range(4)))


NARROW = """
import sys, tempfile
sys.path.insert(0, sys.argv[1])
tempfile.tempdir = sys.argv[2]
from launchers import Elsewhere
from placing import Placer
from batchscape.plan.machine import Machine
names = [f"completes-n{i}-d1" for i in range(400)]
launcher = Placer(Machine(4, "x"), *names, concurrent_runs=4)
begun = []
for line in sys.stdin:
    begun = [name for name in begun if name in launcher.active]
    if begun:
        launcher.end(begun.pop(0))
    launcher.start()
    begun += [name for name in launcher.active if name not in begun]
    print(len(launcher.active), flush=True)
"""


@contextmanager
def narrow_launcher() -> Iterator[Callable[[], int]]:
    """Have another process hold devices for runs of one device each, of which it has plenty.

    Each call of what is yielded ends one of its runs, starts what it can, and returns how many are
    at work.
    """
    command = [sys.executable, "-c", NARROW, str(Path(__file__).parent), tempfile.gettempdir()]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def turn() -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield turn
        process.kill()


def test_a_wide_run_does_not_starve_beside_another_launcher_s_narrow_ones() -> None:
    """One of those always ends while three go on: all devices are never free by chance."""
    with narrow_launcher() as turn:
        assert [turn() for _ in range(3)] == [4, 4, 4]
        wide = Placer(FOUR_CORES, "completes-w-d4", "completes-v-d1")
        assert wide.start() == set()
        waits = "Waiting for cores that another launcher holds ("
        assert str(wide.placement.why_waiting).startswith(waits)
        remaining = []
        while not wide.start():
            remaining.append(turn())
            assert len(remaining) < 10
        assert remaining == [3, 2, 1, 0]
        assert wide.placement.why_waiting is None
        # The others are as they were.
        wide.end("completes-w-d4")
        assert [turn(), turn()] == [4, 4]


def test_a_wide_run_gets_in_beside_narrow_ones_that_take_longer_than_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their launcher, which then waits for the device that it let go, lets go of the next one."""
    clock = 100.0
    monkeypatch.setattr(placement.time, "monotonic", lambda: clock)
    narrow = Placer(FOUR_CORES, *(f"completes-n{i}-d1" for i in range(40)), concurrent_runs=4)
    wide = Placer(FOUR_CORES, "completes-w-d4")
    assert len(narrow.start()) == 4
    rounds = 0
    while not wide.start():
        assert rounds < 4
        clock += 10
        narrow.start()
        narrow.end(next(iter(narrow.active)))
        narrow.start()
        rounds += 1
    wide.end("completes-w-d4")
    assert len(narrow.start()) == 4


def test_wide_launchers_all_get_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_PAUSE_S", 0.0)
    rng = random.Random(0)
    launchers = [
        Placer(FOUR, *(f"completes-{letter}{i}-d{w}" for i, w in enumerate(widths)))
        for letter, widths in {"a": [4, 3, 4, 2], "b": [4, 4, 3, 3], "c": [1, 4, 2, 4]}.items()
    ]
    for _ in range(400):
        rng.choice(launchers).start()
        held_now = [device for launcher in launchers for device in launcher.devices]
        assert len(set(held_now)) == len(held_now)
        active = [launcher for launcher in launchers if launcher.active]
        if active and rng.random() < 0.5:
            launcher = rng.choice(active)
            launcher.end(next(iter(launcher.active)))
            if not launcher.queue:
                launcher.start()
    assert [len(launcher.queue) + len(launcher.active) for launcher in launchers] == [0, 0, 0]


@pytest.mark.slow
def test_a_sweep_waits_for_cores_and_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = [str(tmp_path / "sweep"), "spawn", "completes-d2"]
    with held("cpu", "1") as other, log.open("w") as output:
        command = [sys.executable, str(Path(__file__).parent / "launch_elsewhere.py"), *arguments]
        with subprocess.Popen(command, stdout=output, stderr=output) as launcher:
            wait_until(lambda: "Waiting" in log.read_text(), "it never said that it waits")
            status = RunStatus.read(SweepFolder(tmp_path / "sweep").run("completes-d2").status)
            assert status.status is Status.PENDING
            other.send_signal(signal.SIGKILL)
            assert launcher.wait() == 0
    printed = " ".join(log.read_text().split())
    waits = "Waiting for cores that another launcher holds ("
    assert printed.count(waits) == 1
    folder = SweepFolder(tmp_path / "sweep").run("completes-d2")
    assert RunStatus.read(folder.status).status is Status.COMPLETED
    assert read_json(folder.launch)["devices"] == [0, 1]


def test_a_launcher_that_starts_no_more_runs_keeps_no_device_for_them(tmp_path: Path) -> None:
    """While one of its runs goes on for as long as it takes."""
    sweep = SweepFolder(tmp_path / "sweep")
    names = ("gated-d1", "exits7-d1", "completes-d4")
    specs = [
        spec_named(name, seed=seed, concurrent_runs=3, max_failures=1)
        for seed, name in enumerate(names)
    ]
    mine = locks(count=4)

    def look() -> list[bool]:
        failed = sweep.run("exits7-d1").status
        wait_until(
            lambda: failed.exists() and RunStatus.read(failed).status is Status.FAILED, "no failure"
        )
        try:
            wait_until(lambda: mine.take(2) and not mine.others_wait(), "a device is kept")
            return [mine.take(device) for device in (0, 1)]
        finally:
            (sweep.path / "go").touch()

    with held("cpu", "3"), ThreadPoolExecutor() as beside:
        taken = beside.submit(look)
        result = Launcher(
            sweep,
            FOUR_CORES,
            specs,
            entry=ENTRY,
            method="spawn",
            console=Console(file=io.StringIO()),
        ).run()
        assert taken.result() == [False, True]
    assert [str(run.status) for run in result.runs] == ["completed", "failed", "pending"]
    mine.give_back([1, 2])


@pytest.mark.slow
def test_nobody_waits_for_devices_for_a_run_that_another_launcher_has(
    launch: Callable[..., Elsewhere], tmp_path: Path
) -> None:
    """Its devices are that launcher's own; the narrow run after it would wait for nothing."""
    with held("cpu", "1"):
        claim = CLAIMS.claim(SweepFolder(tmp_path / "sweep").run("completes-d2"))
        assert claim is not None
        launcher = launch("spawn", "completes-d2", "completes-1-later")
        wait_until(lambda: "completes-1-later completed" in launcher.printed, "it waits")
        assert "completes-d2 started" not in launcher.printed
        claim.release()
    assert launcher.process.wait() == 0
    assert launcher.status("completes-d2").status is Status.COMPLETED


@pytest.mark.slow
def test_what_outlives_a_launcher_holds_its_devices(tmp_path: Path) -> None:
    """Copies that ranks left; a fork server would have ended them with itself."""
    script = str(Path(__file__).parent / "launch_elsewhere.py")
    command = [sys.executable, script, str(tmp_path), "spawn", "outlived-d2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as launcher:
        wait_until(lambda: len(pids_in(tmp_path)) == 4, "the ranks never began")
        pids = pids_in(tmp_path)
        mine = locks()
        assert [mine.take(0), mine.take(1)] == [False, False]
        launcher.kill()
    copies = [pid for name, pid in pids.items() if "copy" in name]
    wait_until(lambda: not any(is_alive(p) for p in set(pids.values()) - set(copies)), "ranks")
    assert all(map(is_alive, copies))
    assert [mine.take(0), mine.take(1)] == [False, False]
    for pid in copies:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, copies)), "copies are left")
    for device in (0, 1):
        wait_until(lambda: mine.take(device), "the device is still held")  # noqa: B023
        mine.give_back([device])


LEASER = """
import os, random, sys, tempfile, time
from pathlib import Path
import psutil
tempfile.tempdir = sys.argv[1]
from batchscape.launch.devices import DevicePool
def lives(pid):
    try:
        return psutil.Process(pid).status() != "zombie"
    except psutil.NoSuchProcess:
        return False
rng, marks = random.Random(int(sys.argv[2])), Path(sys.argv[1])
pool, done = DevicePool("cpu", {i: str(i) for i in range(4)}, print), 0
while done < 150:
    lease = pool.lease(rng.randint(1, 4))
    if lease is None:
        time.sleep(rng.random() / 500)
        continue
    for device in lease.devices:
        mark = marks / f"mark-{device}"
        holder = int(mark.read_text() or 0) if mark.exists() else 0
        if holder and lives(holder):
            print("shared with", holder, flush=True)
        mark.write_text(str(os.getpid()))
    time.sleep(rng.random() / 500)
    for device in lease.devices:
        (marks / f"mark-{device}").write_text("")
    pool.release(lease)
    done += 1
    print("leased", flush=True)
print("done", flush=True)
"""


@pytest.mark.slow
def test_processes_killed_at_random_never_share_a_device() -> None:
    """Whoever has a device marks it, and looks for the mark of a living process."""
    rng = random.Random(0)
    lines: list[str] = []
    with ExitStack() as stack:

        def begun(seed: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", LEASER, tempfile.gettempdir(), str(seed)]
            return stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

        going = [begun(seed) for seed in range(3)]
        for seed in range(3, 9):
            victim = rng.choice(going)
            assert victim.stdout is not None
            lines += [victim.stdout.readline().strip() for _ in range(rng.randint(1, 60))]
            victim.kill()
            victim.wait()
            going[going.index(victim)] = begun(seed)
        for process in going:
            assert process.stdout is not None
            lines += process.stdout.read().split("\n")
            assert process.wait() == 0
    assert lines.count("done") == 3
    assert lines.count("leased") > 3 * 150
    assert [line for line in lines if line not in {"leased", "done", ""}] == []
