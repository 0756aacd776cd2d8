"""Time and memory of a plan of many cells: with predictions, beside the plan without them.

With predictions it is `batchscape plan`, for a declared cluster, from the start of the process to
the last line. Without, a process of its own makes the same plan and prints nothing: it builds no
model and does not import torch. Each is run once before, so that bytecode is there.

    python benchmarks/plan_at_scale.py [--cells 10000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

_WITHOUT = """
import sys
from batchscape.cli import _compose, _machine, _make_plan
from batchscape.plan.table import plan_rows
grid = _compose(sys.argv[1:], "plan")
plan_rows(_make_plan(grid, _machine(grid)))
assert "torch" not in sys.modules
"""
PROGRAMS = {"without": ["-c", _WITHOUT], "with": ["-m", "batchscape", "plan"]}


class Measured(NamedTuple):
    """What one process took."""

    wall_s: float
    cpu_s: float
    peak_mib: float


def measured(how: str, seeds: int) -> Measured:
    """Make one plan of 64 cells a seed."""
    arguments = [
        "cluster=h100_80g",
        "cluster.nodes=2",
        "launcher.concurrent_runs=4",
        "batch.global_batch_size=64",
        "batch.data_parallel_size=1,2,4,8",
        "batch.micro_batch_size=1,2,4,8",
        "optimizer.learning_rate=0.001,0.002,0.003,0.004",
        f"seed=range(0,{seeds})",
        "budget.samples=6400",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *PROGRAMS[how], *arguments], stdout=subprocess.DEVNULL, env=environment
    )
    _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(process.returncode)
    return Measured(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def main() -> None:
    """Print time and memory of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    seeds = -(-options.cells // 64)
    medians = {}
    for how in ("without", "with"):
        measured(how, 1)
        runs = [measured(how, seeds) for _ in range(options.repeats)]
        seconds = [run.wall_s for run in runs]
        medians[how] = statistics.median(seconds)
        print(
            f"{how} predictions: {64 * seeds} cells, median {medians[how]:.1f} s "
            f"({min(seconds):.1f} to {max(seconds):.1f}, n = {len(runs)}), "
            f"{statistics.median(run.cpu_s for run in runs):.1f} s of processors, "
            f"peak {max(run.peak_mib for run in runs):.0f} MiB"
        )
    print(f"ratio of the medians, with / without: {medians['with'] / medians['without']:.2f}")


if __name__ == "__main__":
    main()
