"""What starts next: by hand for each rule, and thousands of random sweeps of no time at all."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from batchscape.launch.pool import Lease
from batchscape.launch.reservations import Reservation
from batchscape.launch.schedule import Limits, Queued, Running, decide

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from simulated_sweep import Job, Story, Sweep

EIGHT = Limits(slots=8, runs=16)


def queue(*runs: tuple[str, int, float | None]) -> list[Queued]:
    return [Queued(*run) for run in runs]


def test_one_at_a_time_the_random_order_stays() -> None:
    runs = queue(("short", 1, 1.0), ("long", 1, 100.0), ("wide", 8, 50.0))
    one = Limits(slots=8, runs=1)
    assert decide(runs, [], one, 0.0).start == ("short",)
    assert decide(runs[1:], [Running("short", 1, 0.0, 1.0)], one, 0.5).start == ()
    assert decide(runs[1:], [], one, 1.0).start == ("long",)


def test_longest_first_where_durations_are_known() -> None:
    runs = queue(("a", 1, 1.0), ("b", 1, 3.0), ("c", 1, 2.0), ("d", 1, 3.0))
    assert decide(runs, [], Limits(slots=2, runs=9), 0.0).start == ("b", "d")
    # Limited by the number of runs as by that of devices.
    assert decide(runs, [], Limits(slots=8, runs=3), 0.0).start == ("b", "d", "c")


def test_in_their_order_where_nothing_is_known() -> None:
    runs = queue(("a", 2, None), ("b", 8, None), ("c", 2, None), ("d", 4, None))
    decision = decide(runs, [], EIGHT, 0.0)
    assert decision.start[0] == "a"
    assert "b" not in decision.start
    assert decision.reservation is not None
    assert (decision.reservation.run, decision.reservation.promised_s) == ("b", None)


def test_what_is_unknown_goes_first() -> None:
    runs = queue(("a", 1, 10.0), ("b", 1, None), ("c", 1, 3.0))
    assert set(decide(runs, [], Limits(slots=2, runs=2), 0.0).start) == {"a", "b"}


def test_a_narrow_run_overtakes_where_it_ends_in_time() -> None:
    """Four devices are free until 10 s, when the wide run is to start."""
    running = [Running("r", 4, 0.0, 10.0)]
    wide = Reservation("wide", 8, 0.0, promised_s=10.0)
    runs = queue(("wide", 8, 5.0), ("too long", 1, 11.0), ("just right", 1, 10.0))
    decision = decide(runs, running, EIGHT, 0.0, wide)
    assert decision.start == ("just right",)
    assert decision.reservation == wide
    # A moment later it would not be in time.
    assert decide(runs, running, EIGHT, 0.5, wide).start == ()


def test_a_narrow_run_overtakes_on_devices_that_are_not_needed() -> None:
    running = [Running("r", 4, 0.0, 10.0)]
    six = Reservation("six", 6, 0.0, promised_s=10.0)
    runs = queue(("six", 6, 5.0), ("a", 1, 100.0), ("b", 1, 99.0), ("c", 1, 98.0))
    decision = decide(runs, running, EIGHT, 0.0, six)
    assert decision.start == ("a", "b")
    assert decision.reservation is not None
    assert decision.reservation.beside == (("a", 1), ("b", 1))
    # They still run, so that nothing more is spare, until one of them has ended.
    running += [Running("a", 1, 0.0, 100.0), Running("b", 1, 0.0, 99.0)]
    assert decide(runs[:1] + runs[3:], running, EIGHT, 1.0, decision.reservation).start == ()


def test_what_waits_starts_as_soon_as_it_fits() -> None:
    wide = Reservation("wide", 6, 0.0, promised_s=10.0)
    runs = queue(("long", 4, 100.0), ("wide", 6, 1.0), ("short", 2, 1.0))
    # The run before it ended early; a longer one does not get in between.
    decision = decide(runs, [], EIGHT, 3.0, wide)
    assert decision.start[0] == "wide"
    assert "long" not in decision.start


def test_after_the_promised_time_only_so_many_overtake_as_there_are_devices() -> None:
    """The run that it waits for takes for ever, and what is short is so by its estimate only."""
    limits = Limits(slots=4, runs=9)
    running = [Running("endless", 1, 0.0, 1.0)]
    held: Reservation | None = Reservation("wide", 4, 0.0, promised_s=1.0)
    passed = []
    for number in range(100):
        now_s = 2.0 + number
        runs = queue(("wide", 4, 1.0), (f"n{number}", 1, 0.01))
        decision = decide(runs, running, limits, now_s, held)
        held = decision.reservation
        passed += decision.start
    assert len(passed) == 4
    assert held is not None
    assert held.overtaken == 4


def test_a_reservation_ends_with_its_run() -> None:
    running = [Running("r", 8, 0.0, 10.0)]
    gone = Reservation("gone", 8, 0.0, promised_s=10.0)
    runs = queue(("a", 1, 1.0))
    assert decide(runs, running, EIGHT, 1.0, gone).reservation is None
    assert decide(runs, [], EIGHT, 1.0, gone).start == ("a",)


def test_nothing_to_do() -> None:
    assert decide([], [], EIGHT, 0.0).start == ()
    assert decide([], [Running("r", 1, 0.0)], EIGHT, 0.0).start == ()


def test_many_runs_are_decided_within_a_window() -> None:
    """The longest are planned ahead; a short one still fills what they leave free."""
    runs = queue(("wide", 8, 50.0), *((f"l{i}", 8, 100.0) for i in range(60)), ("s", 1, 1.0))
    running = [Running("r", 4, 0.0, 10.0)]
    decision = decide(runs, running, EIGHT, 0.0)
    assert decision.start == ("s",)


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
    width = rng.choice([1, 1, 2, 4, 8, rng.randint(1, 9)])
    return Job(name, width, attempts, expected_s, cancelled_at_s)


def check_random_sweeps(seed: int, count: int) -> tuple[int, float]:
    """Return the waits that were kept short, and the longest one over the longest attempt."""
    rng, waits, worst = random.Random(seed), 0, 0.0
    for _ in range(count):
        estimates = rng.choice(["right", "wrong", "far too short", "none", "some"])
        devices, runs = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 2, 3, 5, 16])
        shares = rng.choice([1, 1, 1, 2, 3])
        jobs = [random_job(rng, f"r{i}", estimates) for i in range(rng.randint(1, 8))]

        def check(
            leases: dict[str, Lease], _: float, shares: int = shares, runs: int = runs
        ) -> None:
            held = Counter(device for lease in leases.values() for device in lease.devices)
            assert max(held.values()) <= shares
            assert len(leases) <= runs
            assert all(len(set(lease.devices)) == len(lease.devices) for lease in leases.values())

        story = Sweep(jobs, devices, runs, shares, check).run()
        longest_s = max(takes_s for job in jobs for takes_s in job.takes_s)
        never = [job for job in jobs if job.cancelled_at_s == float("inf")]
        assert {job.name for job in never} <= set(story.ended)
        for kept, started_s in story.waits:
            waits += 1
            due_s = kept.since_s if kept.promised_s is None else kept.promised_s
            worst = max(worst, (started_s - due_s) / longest_s)
            assert kept.overtaken <= devices * shares
            # What is promised is kept where the estimates are right, and bounded where not.
            if estimates == "right" and shares == 1:
                assert started_s <= due_s * (1 + 1e-9)
            assert started_s - due_s <= (devices * shares + 1) * longest_s
        if runs == 1:
            assert_in_order(story, jobs)
    return waits, worst


def assert_in_order(story: Story, jobs: list[Job]) -> None:
    """One at a time, first attempts are in the order of the launch."""
    first = list(dict.fromkeys(name for _, name in story.started))
    assert first == [job.name for job in jobs if job.name in first]


def test_random_sweeps_lease_no_device_twice_and_starve_no_run() -> None:
    waits, worst = check_random_sweeps(0, 500)
    assert waits > 1000
    assert worst > 0


@pytest.mark.slow
def test_ten_thousand_random_sweeps() -> None:
    waits, worst = check_random_sweeps(1, 10_000)
    print(f"{waits} reservations; at most {worst:.2f} times the longest attempt over the time")


def test_a_stream_of_narrow_runs_does_not_starve_a_wide_one() -> None:
    """They overlap for ever: without a reservation there is no moment at which all are free."""
    takes_s = [1 + i % 7 / 7 for i in range(60)]
    narrow = [Job(f"n{i}", 1, [each]) for i, each in enumerate(takes_s)]
    wide = Job("wide", 4, [1.0])
    story = Sweep([*narrow[:4], wide, *narrow[4:]], devices=4, runs=9).run()
    started = {name: at for at, name in story.started}
    # Two of them after one another, on each device at most.
    assert started["wide"] <= 2 * max(takes_s)


def test_a_sweep_of_mixed_widths_wastes_little() -> None:
    rng = random.Random(0)
    jobs = []
    for i in range(120):
        width, takes_s = rng.choice([1, 2, 4, 8]), rng.uniform(1, 10)
        jobs.append(Job(f"r{i}", width, [takes_s], takes_s))
    story = Sweep(jobs, devices=8, runs=16).run()
    assert story.makespan_s < 1.05 * sum(job.width * job.takes_s[0] for job in jobs) / 8
