"""Time and memory of a plan of many cells: with predictions, beside the plan without them.

Each plan is made in a process of its own, for a declared cluster, from the command line to the last
figure; nothing is printed of it. Without predictions nothing is built and torch is not imported.

    python benchmarks/plan_at_scale.py [--cells 10000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

_PLAN = """
import resource, sys, time
began = time.perf_counter()
from datetime import datetime
from batchscape.cli import _compose, _machine, _make_plan
from batchscape.plan.table import plan_rows
from batchscape.record.folder import SweepFolder
grid = _compose(sys.argv[2:], "plan")
machine = _machine(grid)
plan = _make_plan(grid, machine)
plan_rows(plan)
if sys.argv[1] == "with":
    from batchscape.plan.forecast_text import forecast_text
    from batchscape.predictor import predict
    found = predict(plan.specs, SweepFolder(plan.sweep_dir), machine)
    assert found.unknown == 0, set(run.way for run in found.runs.values())
    assert all(run.memory.peak_allocated_gib is not None for run in found.runs.values())
    cuts = {spec.run_id: str(spec.geometry) for spec in plan.specs}
    forecast_text(found, cuts, datetime.now().astimezone())
used = resource.getrusage(resource.RUSAGE_SELF)
cpu_s = used.ru_utime + used.ru_stime
print(len(plan.cells), time.perf_counter() - began, cpu_s, used.ru_maxrss / 1024)
"""


def measured(how: str, cells: int) -> tuple[int, float, float, float]:
    """Make one plan; return its cells, seconds on the wall and of processors, and peak in MiB."""
    seeds = -(-cells // 64)
    arguments = [
        "cluster=h100_80g",
        "cluster.nodes=2",
        "launcher.concurrent_runs=4",
        "batch.global_batch_size=64",
        "batch.data_parallel_size=1,2,4,8",
        "batch.micro_batch_size=1,2,4,8",
        "optimizer.learning_rate=0.001,0.002,0.003,0.004",
        f"seed=range(0,{max(1, seeds)})",
        "budget.samples=6400",
    ]
    done = subprocess.run(
        [sys.executable, "-c", _PLAN, how, *arguments], capture_output=True, text=True, check=True
    )
    count, *figures = done.stdout.split()[-4:]
    wall_s, cpu_s, peak_mib = map(float, figures)
    return int(count), wall_s, cpu_s, peak_mib


def main() -> None:
    """Print time and memory of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    medians = {}
    for how in ("without", "with"):
        runs = [measured(how, options.cells) for _ in range(options.repeats)]
        seconds = [run[1] for run in runs]
        medians[how] = statistics.median(seconds)
        print(
            f"{how} predictions: {runs[0][0]} cells, median {medians[how]:.1f} s "
            f"({min(seconds):.1f} to {max(seconds):.1f}, n = {len(runs)}), "
            f"{statistics.median(run[2] for run in runs):.1f} s of processors, "
            f"peak {max(run[3] for run in runs):.0f} MiB"
        )
    print(f"ratio of the medians, with / without: {medians['with'] / medians['without']:.2f}")


if __name__ == "__main__":
    main()
