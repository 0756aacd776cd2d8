"""Time that a run costs beside its training: ours against submitit's and joblib's launcher.

The same short runs, one rank each, are launched by three launchers in turn, in an order that is
shuffled anew each round. The overhead of a run is the time that a slot of the launcher is taken
and not training: (slots x wall time of the sweep - sum of the training times) / runs. It contains
the start of the launcher's own servers, the imports, the first step's preparation and the record.

    python benchmarks/run_overhead.py [--rounds 4] [--runs 12]
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import hydra
import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track
from scipy import stats
from short_run import make_run, training_time_s, write_run

from batchscape.record.spec import RunSpec

OPTIMIZER_STEPS = 5
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def ours(root: Path, specs: list[RunSpec]) -> int:
    """Launch through this project; the server boots anew for every sweep."""
    from batchscape.launch.launcher import Launcher
    from batchscape.plan.machine import Machine
    from batchscape.record.folder import SweepFolder

    sweep = SweepFolder(root)
    with Path(os.devnull).open("w") as nowhere:
        result = Launcher(sweep, Machine.detect(), specs, console=Console(file=nowhere)).run()
    if result.failed:
        raise RuntimeError(result.failed[0].reason)
    return 1


def submitit_local(root: Path, specs: list[RunSpec]) -> int:
    """One job after the other, as a timed sweep must run them."""
    import submitit

    from batchscape.train import worker

    executor = submitit.AutoExecutor(folder=root / "submitit", cluster="local")
    executor.update_parameters(timeout_min=5)
    for spec in specs:
        code = executor.submit(worker.main, str(root / "runs" / spec.run_id), 0).result()
        if code:
            raise RuntimeError(f"{spec.run_id} failed")
    return 1


def hydra_joblib(root: Path, specs: list[RunSpec]) -> int:
    """Two jobs at a time: with one, joblib runs them inside the launching process."""
    command = [sys.executable, __file__, "--multirun", "hydra/launcher=joblib"]
    command += ["hydra.launcher.n_jobs=2", f"hydra.sweep.dir={root}/hydra", f"+root={root}"]
    names = ",".join(spec.run_id for spec in specs)
    subprocess.run([*command, f"+name={names}"], check=True, stdout=subprocess.DEVNULL)
    return 2


@hydra.main(version_base=None, config_path=None)
def joblib_job(config: DictConfig) -> None:
    """Train one run, as Hydra's job."""
    from batchscape.train import worker

    if worker.main(str(Path(config.root) / "runs" / config.name), 0):
        raise RuntimeError(config.name)


def measure(launcher: Callable[[Path, list[RunSpec]], int], specs: list[RunSpec]) -> float:
    """Return the overhead of a run, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if launcher is not ours:
            for spec in specs:
                write_run(spec, root / "runs")
        began = time.perf_counter()
        slots = launcher(root, specs)
        wall_s = time.perf_counter() - began
        trained_s = sum(training_time_s(root / "runs" / spec.run_id) for spec in specs)
    return (slots * wall_s - trained_s) / len(specs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="at least 2")
    parser.add_argument("--runs", type=int, default=12, help="runs a sweep")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    specs = [make_run(f"run{number}", OPTIMIZER_STEPS) for number in range(options.runs)]
    launchers = [ours, submitit_local, hydra_joblib]
    found: dict[str, list[float]] = {launcher.__name__: [] for launcher in launchers}
    order = [launcher for _ in range(options.rounds) for launcher in random.sample(launchers, 3)]
    for launcher in track(order, description="measuring"):
        found[launcher.__name__].append(measure(launcher, specs))
    print(f"overhead a run, {options.rounds} rounds of {options.runs} runs, interleaved")
    for name, overheads in found.items():
        print(f"  {name:15s} {np.mean(overheads):6.3f} s  (rounds: {np.round(overheads, 3)})")
    for name in ("submitit_local", "hydra_joblib"):
        ratios = np.log(np.array(found[name]) / np.array(found["ours"]))
        half = stats.t.ppf(0.975, len(ratios) - 1) * stats.sem(ratios)
        low, middle, high = np.exp([ratios.mean() - half, ratios.mean(), ratios.mean() + half])
        print(f"ratio {name} / ours: {middle:.1f} (95 % interval {low:.1f} to {high:.1f})")


if __name__ == "__main__":
    if "--multirun" in sys.argv:
        joblib_job()
    else:
        main()
