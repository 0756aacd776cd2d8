"""Waiting for a core is what the system counts, and it is seen where there is competition."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from batchscape.measure import contention
from batchscape.measure.contention import CoreWaits, TreeWaits

SCHEDSTAT = Path("/proc/self/schedstat")
BUSY = "import os; os.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {parent}: pass"


@pytest.mark.slow
@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="the system does not tell")
def test_a_core_that_others_take_away_is_waited_for():
    """However long it takes until it was taken away twenty times."""
    core = min(os.sched_getaffinity(0))
    probe = (
        "import os, resource\n"
        "from batchscape.measure.contention import CoreWaits\n"
        f"os.sched_setaffinity(0, {{{core}}})\n"
        "waits, own = CoreWaits(), resource.RUSAGE_SELF\n"
        "began = resource.getrusage(own).ru_nivcsw\n"
        "while resource.getrusage(own).ru_nivcsw < began + 20: pass\n"
        "found = waits.since_last()\n"
        "print(found.core_wait_s, found.involuntary_switches)\n"
    )
    busy = BUSY.format(core=core, parent=os.getpid())
    rivals = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(2)]
    try:
        printed = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, check=True
        ).stdout
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    wait_s, switches = printed.split()
    assert float(wait_s) > 0
    assert int(switches) >= 20


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="the system does not tell")
def test_what_is_told_is_what_the_system_counts():
    """In seconds, since the last call alone; asleep, nothing is waited for."""

    def counted_s():
        return int(SCHEDSTAT.read_text().split()[1]) / 1e9

    before = counted_s()
    waits = CoreWaits()
    least = counted_s()
    for work in (lambda: sum(range(1_000_000)), lambda: time.sleep(0.05)):
        work()
        most = counted_s()
        told = waits.since_last().core_wait_s
        after = counted_s()
        assert most - least - 1e-9 <= told <= after - before + 1e-9
        before, least = most, after
    waits.close()


class Proc:
    """A folder in place of /proc, and a clock; waits are in milliseconds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.now_s = 100.0
        self.spent_s = 0.0
        monkeypatch.setattr(contention, "_PROC", folder)
        monkeypatch.setattr(contention.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(contention.time, "thread_time", self.thread_time)

    def thread_time(self) -> float:
        self.spent_s += 0.001
        return self.spent_s

    def process(self, pid: int, threads: dict[int, int], below: tuple[int, ...] = ()) -> None:
        for number, (thread, waited_ms) in enumerate(threads.items()):
            task = self.folder / str(pid) / "task" / str(thread)
            task.mkdir(parents=True, exist_ok=True)
            (task / "schedstat").write_text(f"{4_000_000 * waited_ms} {waited_ms * 1_000_000} 17\n")
            # The children of a process are those of its threads; here all are of the last.
            is_last = number == len(threads) - 1
            (task / "children").write_text(" ".join(map(str, below)) + " " if is_last else "")
        (self.folder / str(pid) / "schedstat").write_text("1 2 3\n")

    def end(self, pid: int) -> None:
        shutil.rmtree(self.folder / str(pid))


def test_the_thread_that_waited_longest_counts_between_two_looks(tmp_path, monkeypatch):
    proc = Proc(tmp_path, monkeypatch)
    # The guard 1 above the program 10, whose second thread started 20, which started 30.
    proc.process(1, {1: 50_000}, (10,))
    proc.process(10, {10: 40, 11: 90}, (20,))
    proc.process(20, {20: 0}, (30,))
    proc.process(30, {30: 10})
    waits = TreeWaits(1)
    assert waits.share_since(0.0) is None, "nobody has looked"

    proc.now_s = 101.0
    waits.look()
    assert waits.share_since(0.0) == pytest.approx(0.09)
    assert waits.share_since(100.5) == pytest.approx(0.09), "between two looks it is even"

    # 20 waits; a loader of data, 40, has slept; 50 began, and has waited more than anybody.
    proc.now_s = 103.0
    proc.process(20, {20: 400}, (30, 40, 50))
    proc.process(40, {40: 1})
    proc.process(50, {50: 600, 51: 2})
    waits.look()
    assert waits.share_since(101.0) == pytest.approx(0.6 / 2)
    assert waits.share_since(0.0) == pytest.approx(0.6 / 3)
    assert waits.processors_since(101.0) == pytest.approx(4 * (0.4 + 0.001 + 0.6 + 0.002) / 2)

    # 50 has ended, and its number is that of another process now, which has waited less.
    proc.now_s = 104.0
    proc.end(50)
    proc.process(20, {20: 410}, (30, 40, 50))
    proc.process(50, {50: 300})
    waits.look()
    assert waits.share_since(103.0) == pytest.approx(0.3)
    assert waits.share_since(102.0) == pytest.approx(0.3 / 2), "50 was two threads"
    assert waits.share_since(0.0) == pytest.approx(0.6 / 4), "which has ended"

    # What is listed and has ended since is passed over; the guard's own wait is nobody's.
    proc.now_s = 105.0
    proc.end(50)
    proc.process(1, {1: 90_000}, (10,))
    waits.look()
    assert waits.share_since(104.0) == 0.0
    proc.now_s = 900.0
    assert waits.share_since(899.0) == 0.0, "after the last look nothing is known: that one counts"

    # A wait counts once it is over, and there is no more of it than time.
    proc.now_s = 105.5
    proc.process(10, {10: 40, 11: 5000}, (20,))
    waits.look()
    assert waits.share_since(105.0) == 1.0


def test_threads_that_wait_in_turn_are_no_slow_rank(tmp_path, monkeypatch):
    """Ten threads that wait 1 % each, one after another, however many looks are kept."""
    monkeypatch.setattr(contention, "_MOST_LOOKS", 8)
    proc = Proc(tmp_path, monkeypatch)
    proc.process(1, {1: 0}, (10, 20))
    waited_ms = dict.fromkeys(range(10, 20), 0)
    proc.process(20, {20: 0})
    waits = TreeWaits(1)
    for number in range(100):
        proc.now_s += 1
        waited_ms[10 + number % 10] += 100
        proc.process(10, waited_ms)
        if number == 49:
            proc.process(20, {20: 5000})
            waits.look()
            proc.process(1, {1: 0}, (10,))
        waits.look()
    assert waits.share_since(199.0) == pytest.approx(0.1)
    assert waits.processors_since(100.0) == pytest.approx(4 * (100 * 0.1 + 5) / 100)
    assert waits.share_since(100.0) == pytest.approx(0.05), "that of 20, which has ended"
    assert len(waits._looks) <= 8


def test_looking_takes_a_hundredth_of_the_time_at_most(tmp_path, monkeypatch):
    proc = Proc(tmp_path, monkeypatch)
    proc.process(1, {1: 0}, (10,))
    waits = TreeWaits(1)
    looks = 0
    for number in range(200):
        proc.now_s += 0.05
        proc.process(10, {10: number**2 // 8})
        before = waits.share_since(0.0)
        waits.look()
        looks += waits.share_since(0.0) != before
    # A look costs a millisecond of the clock above, and there are 10 s.
    assert 60 < looks <= 100


def test_a_system_that_tells_no_waits_is_not_taken_for_a_calm_one(tmp_path, monkeypatch):
    proc = Proc(tmp_path, monkeypatch)
    proc.process(1, {1: 0}, (10,))
    proc.process(10, {10: 0})
    (tmp_path / "1" / "schedstat").unlink()
    waits = TreeWaits(1)
    proc.now_s += 1
    waits.look()
    assert waits.share_since(0.0) is None


def test_processor_time_is_that_of_all_threads_and_of_no_wait() -> None:
    own_s: list[float] = []

    def work(iterations: int) -> None:
        time.sleep(0.02)
        sum(range(iterations))
        own_s.append(time.thread_time())

    def spent_s() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    waits = CoreWaits()
    for iterations in (0, 2_000_000):
        thread = threading.Thread(target=work, args=(iterations,))
        before_s = spent_s()
        waits.since_last()
        thread.start()
        thread.join()
        found_s = waits.since_last().processor_time_s
        # What the system counts around it is more, but for the grain of its clock.
        assert found_s is not None
        assert own_s[-1] <= found_s <= spent_s() - before_s + 0.01
    waits.close()
