"""What starts next: by hand for each rule, and random sweeps of no time at all."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from batchscape.launch.pool import DevicePool, Lease
from batchscape.launch.schedule import Schedule

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from simulated_sweep import Job, first_come_first_served_s, optimum_s, run


class Queue:
    """Runs, by name: the ranks of each, and how long it should take."""

    def __init__(
        self, devices: int, runs: Mapping[str, tuple[int, float | None]], at_once: int = 16
    ) -> None:
        self.expected = {name: expected_s for name, (_, expected_s) in runs.items()}
        self.queue = {name: ranks for name, (ranks, _) in runs.items()}
        self.schedule = Schedule(DevicePool(range(devices)), at_once, self.expected.get)

    def starts(self, now_s: float = 0.0) -> list[str]:
        """Start what can start."""
        found = []
        while (started := self.schedule.next(self.queue, now_s)) is not None:
            del self.queue[started[0]]
            found.append(started[0])
        return found

    @property
    def waits(self) -> str | None:
        kept = self.schedule.reservation
        return None if kept is None else kept.run


def test_one_at_a_time_the_order_of_the_launch_stays() -> None:
    runs = {"short": (1, 1.0), "long": (1, 100.0), "wide": (8, 50.0)}
    queue = Queue(8, runs, at_once=1)
    for name in runs:
        assert queue.starts() == [name]
        queue.schedule.release(name)


def test_the_longest_first() -> None:
    runs = {"a": (1, 1.0), "b": (1, 3.0), "c": (1, 2.0), "d": (1, 3.0)}
    assert Queue(2, runs).starts() == ["b", "d"]
    # Limited by the number of runs as by that of devices.
    assert Queue(8, runs, at_once=3).starts() == ["b", "d", "c"]


def test_what_nobody_can_tell_goes_first_and_in_its_order() -> None:
    runs = {"a": (1, 10.0), "b": (1, None), "c": (1, 3.0), "d": (1, None)}
    assert Queue(3, runs).starts() == ["b", "d", "a"]


def test_another_run_starts_first_where_it_should_end_in_time() -> None:
    """Four of eight devices are free until 10 s."""
    queue = Queue(8, {"r": (4, 10.0), "wide": (8, 9.0), "a": (1, 8.0), "b": (1, 7.5)})
    assert queue.starts() == ["r", "a", "b"]
    assert queue.waits == "wide"
    queue.queue |= {"c": 1, "d": 1}
    queue.expected |= {"c": 4.0, "d": 3.0}
    assert queue.starts(now_s=7.0) == ["d"]
    # The run that it waits for is late: it may end at any moment.
    queue.queue["tiny"], queue.expected["tiny"] = 1, 0.01
    assert queue.starts(now_s=11.0) == []
    for name in ("r", "a", "b", "d"):
        queue.schedule.release(name)
    assert queue.starts(now_s=12.0) == ["wide"]


def test_estimates_that_grow_extend_no_wait() -> None:
    queue = Queue(8, {"r": (4, 10.0), "wide": (8, 9.0), "a": (1, 8.0)})
    assert queue.starts() == ["r", "a"]
    queue.queue["b"], queue.expected["a"], queue.expected["b"] = 1, 100.0, 1.0
    queue.schedule.release("r")
    # What it waited for has ended; that another run should take longer by now is no reason.
    assert queue.starts(now_s=9.0) == []
    queue.schedule.release("a")
    assert queue.starts(now_s=20.0) == ["wide"]


def test_another_run_starts_first_on_devices_that_nobody_keeps() -> None:
    queue = Queue(8, {"r": (4, 10.0), "six": (6, 9.0)})
    assert queue.starts() == ["r"]
    queue.queue |= {"a": 1, "b": 1, "c": 1}
    queue.expected |= {"a": 8.9, "b": None, "c": None}
    # Two of its eight devices stay free of the one that waits, however long they take; the third
    # of the others is on time only where it can be told.
    assert queue.starts(now_s=5.0) == []
    queue.schedule.release("r")
    assert queue.starts(now_s=6.0) == ["six", "b", "c"]


def test_nothing_passes_where_nothing_is_known() -> None:
    queue = Queue(4, {"a": (1, None), "wide": (4, None), "b": (1, None)})
    assert queue.starts() == ["a"]
    assert queue.waits == "wide"
    # Another run has told what its likes take, among them the one at work.
    queue.expected |= {"a": 10.0, "b": 2.0, "wide": 1.0}
    assert queue.starts(now_s=3.0) == ["b"]


def test_what_is_short_by_its_estimate_alone_does_not_pass_for_ever() -> None:
    queue = Queue(4, {"endless": (1, 1.0), "wide": (4, 0.9)})
    assert queue.starts() == ["endless"]
    passed = []
    for number in range(100):
        name = f"n{number}"
        queue.queue[name], queue.expected[name] = 1, 0.01
        passed += queue.starts(now_s=number / 20)
    assert all(int(name.removeprefix("n")) < 20 for name in passed)
    for name in ["endless", *passed]:
        queue.schedule.release(name)
    assert queue.starts(now_s=1000.0)[0] == "wide"


def test_a_reservation_ends_with_its_run() -> None:
    queue = Queue(8, {"r": (4, 10.0), "gone": (8, 9.0)})
    assert queue.starts() == ["r"]
    del queue.queue["gone"]
    queue.queue["long"], queue.expected["long"] = 4, 100.0
    assert queue.starts(now_s=1.0) == ["long"]
    assert queue.waits is None


def random_job(rng: random.Random, name: str, estimates: str) -> Job:
    takes_s = rng.choice([1.0, 2.0, 5.0, rng.uniform(0.1, 10), rng.uniform(0.1, 100)])
    attempts = [takes_s]
    cancelled_at_s = float("inf")
    if estimates != "right":
        attempts = [takes_s * rng.random() for _ in range(rng.choice([0, 0, 0, 1, 2]))] + attempts
        cancelled_at_s = rng.uniform(0, 50) if rng.random() < 0.1 else cancelled_at_s
    expected_s = {
        "right": takes_s,
        "none": None,
        "far too short": takes_s * 0.01,
        "wrong": takes_s * 10 ** rng.uniform(-2, 2),
        "some": rng.choice([None, takes_s, takes_s * rng.uniform(0.1, 10)]),
    }[estimates]
    ranks = rng.choice([1, 1, 2, 4, 8, rng.randint(1, 9)])
    return Job(name, ranks, attempts, expected_s, cancelled_at_s)


def check_random_sweeps(seed: int, count: int) -> int:
    """Return how many runs waited with a reservation."""
    rng, waits = random.Random(seed), 0
    for _ in range(count):
        estimates = rng.choice(["right", "wrong", "far too short", "none", "some"])
        devices, runs = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 2, 3, 5, 16])
        shares = rng.choice([1, 1, 1, 2, 3])
        jobs = [random_job(rng, f"r{i}", estimates) for i in range(rng.randint(1, 20))]

        def check(leases: dict[str, Lease], shares: int = shares, runs: int = runs) -> None:
            held = Counter(device for lease in leases.values() for device in lease.devices)
            assert max(held.values()) <= shares
            assert len(leases) <= runs
            assert all(len(set(lease.devices)) == len(lease.devices) for lease in leases.values())

        story = run(jobs, devices, runs, shares, check)
        never = [job for job in jobs if job.cancelled_at_s == float("inf")]
        assert {job.name for job in never} <= set(story.ended)
        # Whatever was estimated: after two runs one after the other, of those that there are.
        longest_s = max(takes_s for job in jobs for takes_s in job.takes_s)
        assert max(story.waits, default=0.0) <= 2 * longest_s + 1e-9
        waits += len(story.waits)
        if runs == 1:
            first = list(dict.fromkeys(name for _, name in story.started))
            assert first == [job.name for job in jobs if job.name in first]
    return waits


def test_random_sweeps_lease_no_device_twice_and_starve_no_run() -> None:
    assert check_random_sweeps(0, 300) > 500


@pytest.mark.slow
def test_thousands_of_random_sweeps() -> None:
    assert check_random_sweeps(1, 5000) > 10_000


def test_the_oracle_by_hand() -> None:
    assert optimum_s([(1, 3.0), (1, 3.0), (1, 2.0), (1, 2.0), (1, 2.0)], devices=2, runs=9) == 6
    assert optimum_s([(2, 1.0), (1, 2.0), (1, 2.0)], devices=2, runs=9) == 3
    # One at a time, whatever the devices.
    assert optimum_s([(1, 1.0), (1, 2.0)], devices=8, runs=1) == 3
    # The narrow ones fill the time beside the longest of them.
    assert optimum_s([(4, 1.0), (8, 3.0), (4, 3.0), (4, 1.0)], devices=8, runs=9) == 6
    assert first_come_first_served_s([(1, 3.0), (2, 1.0), (1, 3.0)], devices=2, runs=9) == 7


def test_a_sweep_takes_little_longer_than_it_must() -> None:
    """Against brute force and a plain queue; each ratio can only be beaten by a better schedule."""
    rng, over, queued = random.Random(0), [], []
    for _ in range(200):
        devices, runs = rng.choice([2, 4, 8]), rng.choice([2, 4, 8])
        jobs = [
            (rng.choice([w for w in (1, 2, 4, 8) if w <= devices]), rng.uniform(0.1, 10))
            for _ in range(rng.randint(2, 6))
        ]
        sweep = [Job(str(i), ranks, [s], s) for i, (ranks, s) in enumerate(jobs)]
        ours, best = run(sweep, devices, runs).makespan_s, optimum_s(jobs, devices, runs)
        assert ours >= best - 1e-9
        over.append(ours / best)
        queued.append(ours / first_come_first_served_s(jobs, devices, runs))
    assert sum(over) / len(over) < 1.02
    assert sum(queued) / len(queued) < 0.97
