"""Time of whole sweeps as the launcher schedules them: against the optimum, and against queues.

Sweeps of runs of 1, 2, 4 and 8 devices are simulated with the launcher's own pool and schedule and
known durations. Small ones are compared with the optimum, which brute force finds; larger ones with
a bound that no schedule can pass (all devices busy to the end, or the longest run). For comparison:
the same runs strictly in their order, as most queues start them. Simulated time only: the figures
do not depend on the machine.

    python benchmarks/schedule.py [--small 400] [--large 40]
"""

from __future__ import annotations

import argparse
import random
import statistics

from simulated_sweep import Job, Sweep, first_come_first_served_s, optimum_s

DEVICES = (1, 2, 4, 8)


def drawn(rng: random.Random, devices: int, count: int) -> list[tuple[int, float]]:
    """Draw runs: repeats of a few durations, as seeds of a cell, or durations all different."""
    widths = [width for width in DEVICES if width <= devices]
    few = [rng.uniform(1, 10) for _ in range(3)]
    alike = rng.random() < 0.5
    return [
        (rng.choice(widths), rng.choice(few) if alike else rng.uniform(0.1, 10))
        for _ in range(count)
    ]


def scheduled_s(jobs: list[tuple[int, float]], devices: int, runs: int) -> float:
    sweep = [Job(str(i), width, [takes], takes) for i, (width, takes) in enumerate(jobs)]
    return Sweep(sweep, devices, runs).run().makespan_s


def show(bound: str, runs: str, over: list[float], queued: list[float]) -> None:
    print(f"{len(over)} sweeps of {runs} runs")
    for name, values in (("scheduled", over), ("in their order", queued)):
        mean, worst = statistics.mean(values), max(values)
        print(f"  ratio {name} / {bound}: worst {worst:.3f}, mean {mean:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", type=int, default=400)
    parser.add_argument("--large", type=int, default=40)
    options = parser.parse_args()
    rng = random.Random(0)

    over: list[float] = []
    queued: list[float] = []
    for _ in range(options.small):
        devices, runs = rng.choice(DEVICES), rng.choice([2, 4, 8])
        jobs = drawn(rng, devices, rng.randint(2, 6))
        best = optimum_s(jobs, devices, runs)
        over.append(scheduled_s(jobs, devices, runs) / best)
        queued.append(first_come_first_served_s(jobs, devices, runs) / best)
    show("optimum", "2 to 6", over, queued)

    over, queued = [], []
    for _ in range(options.large):
        devices = rng.choice(DEVICES[1:])
        jobs = drawn(rng, devices, rng.randint(20, 120))
        longest = max(takes for _, takes in jobs)
        least = max(longest, sum(width * takes for width, takes in jobs) / devices)
        over.append(scheduled_s(jobs, devices, devices) / least)
        queued.append(first_come_first_served_s(jobs, devices, devices) / least)
    show("lower bound", "20 to 120", over, queued)


if __name__ == "__main__":
    main()
