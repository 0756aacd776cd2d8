"""The time of a whole sweep against the least possible, found by brute force."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from simulated_sweep import Job, Sweep, first_come_first_served_s, optimum_s


def test_the_oracle_by_hand() -> None:
    assert optimum_s([(1, 3.0), (1, 3.0), (1, 2.0), (1, 2.0), (1, 2.0)], devices=2, runs=9) == 6
    assert optimum_s([(2, 1.0), (1, 2.0), (1, 2.0)], devices=2, runs=9) == 3
    # One at a time, whatever the devices.
    assert optimum_s([(1, 1.0), (1, 2.0)], devices=8, runs=1) == 3
    # The narrow ones fill the time beside the longest of them.
    assert optimum_s([(4, 1.0), (8, 3.0), (4, 3.0), (4, 1.0)], devices=8, runs=9) == 6


def test_the_order_of_arrival_by_hand() -> None:
    assert first_come_first_served_s([(1, 3.0), (2, 1.0), (1, 3.0)], devices=2, runs=9) == 7


def ratios(seed: int, count: int, most_runs: int) -> list[float]:
    rng, found = random.Random(seed), []
    for _ in range(count):
        devices, runs = rng.choice([1, 2, 4, 8]), rng.choice([2, 3, 4, 8])
        widths = [width for width in (1, 2, 4, 8) if width <= devices]
        jobs = [
            (
                rng.choice(widths),
                rng.choice([1.0, 2.0, 3.0, 5.0, 8.0])
                if rng.random() < 0.5
                else rng.uniform(0.1, 10),
            )
            for _ in range(rng.randint(2, most_runs))
        ]
        sweep = [Job(str(i), width, [s], s) for i, (width, s) in enumerate(jobs)]
        ratio = Sweep(sweep, devices, runs).run().makespan_s / optimum_s(jobs, devices, runs)
        assert ratio > 1 - 1e-9, (jobs, devices, runs)
        found.append(ratio)
    return found


def test_within_a_tenth_of_the_optimum() -> None:
    assert max(ratios(seed=0, count=400, most_runs=6)) < 1.1


@pytest.mark.slow
def test_within_a_tenth_of_the_optimum_in_thousands_of_cases() -> None:
    assert max(ratios(seed=1, count=2000, most_runs=6)) < 1.1
    assert max(ratios(seed=2, count=100, most_runs=8)) < 1.1
