"""Time of whole sweeps as the launcher schedules them: against a plain queue, and the optimum.

Sweeps of runs of 1, 2, 4 and 8 devices are simulated with the launcher's own pool and schedule and
known durations. All are compared with the same runs strictly in their order (first in, first out);
small ones with the optimum, which brute force finds; larger ones with a bound that no schedule can
pass (all devices busy to the end, or the longest run). Simulated time only: the figures do not
depend on the machine.

    python benchmarks/schedule.py [--small 400] [--large 40]
"""

from __future__ import annotations

import argparse
import random
import statistics

from simulated_sweep import Job, first_come_first_served_s, optimum_s, run

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
    return run(sweep, devices, runs).makespan_s


def least_s(jobs: list[tuple[int, float]], devices: int) -> float:
    longest = max(takes for _, takes in jobs)
    return max(longest, sum(width * takes for width, takes in jobs) / devices)


def show(over: str, ratios: list[float]) -> None:
    mean, best, worst = statistics.mean(ratios), min(ratios), max(ratios)
    print(f"  ratio our queue / {over}: mean {mean:.3f}, from {best:.3f} to {worst:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", type=int, default=400)
    parser.add_argument("--large", type=int, default=40)
    options = parser.parse_args()
    rng = random.Random(0)
    for name, sweeps, few, many in (
        ("optimum", options.small, 2, 6),
        ("bound", options.large, 20, 120),
    ):
        fifo, best = [], []
        for _ in range(sweeps):
            devices = rng.choice(DEVICES)
            jobs = drawn(rng, devices, rng.randint(few, many))
            runs = rng.choice([2, 4, 8]) if name == "optimum" else devices
            ours = scheduled_s(jobs, devices, runs)
            least = optimum_s(jobs, devices, runs) if name == "optimum" else least_s(jobs, devices)
            fifo.append(ours / first_come_first_served_s(jobs, devices, runs))
            best.append(ours / least)
        print(f"{sweeps} sweeps of {few} to {many} runs")
        show("first in, first out", fifo)
        show(f"{name}", best)


if __name__ == "__main__":
    main()
