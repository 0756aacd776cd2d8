"""Waiting for a core is what the system counts, and it is seen where there is competition."""

from __future__ import annotations

import os
import resource
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
        "print(found.core_wait_s)\n"
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
    assert float(printed) > 0


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
        wait_s = waits.since_last().core_wait_s
        after = counted_s()
        assert most - least - 1e-9 <= wait_s <= after - before + 1e-9
        before, least = most, after
    waits.close()


class Tree:
    """What the processes of a program have taken, by a clock that is set; waits in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.spent_s, self.cost_s = 0.0, 0.001
        self.waited_s: dict[str, float] = {}
        monkeypatch.setattr(contention, "_process_times_below", self.taken_below)
        monkeypatch.setattr(contention.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(contention.time, "thread_time", self.thread_time)

    def taken_below(self, root: int) -> dict[str, contention._ProcessTimes]:
        assert root == 1
        return {name: contention._ProcessTimes(s, 4 * s) for name, s in self.waited_s.items()}

    def thread_time(self) -> float:
        self.spent_s += self.cost_s
        return self.spent_s


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(monkeypatch)


def test_the_process_that_waited_longest_counts_between_two_looks(tree: Tree) -> None:
    waits = TreeWaits(1)
    assert waits.share_since(0.0) is None, "nobody has looked"

    tree.now_s = 101.0
    tree.waited_s = {"launcher": 0.04, "rank": 0.09}
    waits.look()
    assert waits.share_since(0.0) == pytest.approx(0.09)
    assert waits.share_since(100.5) == pytest.approx(0.09), "between two looks it is even"

    # One begins, and has waited more than anybody; another sleeps.
    tree.now_s = 103.0
    tree.waited_s |= {"rank": 0.4, "loader": 0.0, "late": 0.6}
    waits.look()
    assert waits.share_since(101.0) == pytest.approx(0.6 / 2)
    assert waits.share_since(102.0) == pytest.approx(0.6 / 2), "the last but one at the latest"
    assert waits.share_since(0.0) == pytest.approx((0.09 + 0.6) / 3)
    assert waits.processors_since(101.0) == pytest.approx(4 * (0.31 + 0.6) / 2)

    # What has ended is part of what was before, and of nothing after it.
    tree.now_s = 104.0
    del tree.waited_s["late"]
    tree.waited_s["rank"] = 0.5
    waits.look()
    assert waits.share_since(103.0) == pytest.approx(0.1)
    assert waits.share_since(0.0) == pytest.approx((0.09 + 0.6 + 0.1) / 4)

    # All have ended: nothing is known of after that.
    tree.now_s = 105.0
    tree.waited_s.clear()
    waits.look()
    assert waits.share_since(103.0) == pytest.approx(0.1)

    # A wait counts once it is over, and there is no more of it than time.
    tree.waited_s["rank"] = 5.0
    tree.now_s = 106.0
    waits.look()
    assert waits.share_since(105.0) == 1.0


def test_what_is_forgotten_of_long_ago_changes_no_sum(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contention, "_MOST_LOOKS", 8)
    waits = TreeWaits(1)
    for number in range(1, 101):
        tree.now_s += 1
        tree.waited_s["rank"] = 0.1 * number
        waits.look()
    for begin_s in (100.0, 150.0, 199.0):
        assert waits.share_since(begin_s) == pytest.approx(0.1)
    assert len(waits._looks) <= 8


@pytest.mark.parametrize(("cost_s", "looks"), [(0.0001, 500), (0.01, 50)])
def test_looking_takes_a_hundredth_of_the_time_at_most(
    tree: Tree, cost_s: float, looks: int
) -> None:
    """In 50 s, polled every 50 ms; ten looks a second at most."""
    tree.cost_s = cost_s
    tree.waited_s["rank"] = 0.0
    waits = TreeWaits(1)
    for _ in range(1000):
        tree.now_s += 0.05
        waits.look()
    assert 0.75 * looks <= len(waits._looks) - 1 <= looks


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="the system does not tell")
def test_processes_below_are_asked_and_the_one_above_is_not() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', sys.argv[1]])"
    work = "sum(range(3_000_000)); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", child, work], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        taken = contention._process_times_below(os.getpid())
        below = contention._process_times_below(program.pid)
        program.communicate(b"\n")
    (worker,) = below
    # Other tests of this process may have left it children of their own.
    assert {process.pid for process in taken} >= {program.pid, worker.pid}
    assert os.getpid() not in {process.pid for process in taken}
    assert below[worker].processor_s > 0
    assert below[worker].waited_s >= 0
    assert contention._process_times_below(program.pid) == {}


def test_processor_time_is_that_of_all_threads_and_of_no_wait() -> None:
    own_s: list[float] = []

    def work(iterations: int) -> None:
        time.sleep(0.02)
        sum(range(iterations))
        own_s.append(time.thread_time())

    def spent_s() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

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
