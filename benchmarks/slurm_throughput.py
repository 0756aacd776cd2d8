r"""Short runs on a cluster: by pool jobs, by one job a run, and by Hydra's submitit launcher.

The same runs, one rank each and about a second of training, are done on an emulated Slurm
(`tests/slurm/cluster.py`) whose nodes have one core each, as many as there are cores here. Pool
jobs do all of them; the peers, of which each run costs the same, some of them. The overhead of a
run is the time that a node is taken for it and not training. Nobody else waits in this queue: on a
cluster that is used, each job of the peers waits.

    python benchmarks/slurm_throughput.py [--runs 200] [--peer-runs 40] [--steps 250]
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import hydra
import submitit
from omegaconf import DictConfig
from rich.console import Console
from short_run import make_run, training_time_s, write_run

from batchscape.config import Cluster, Slurm
from batchscape.launch.slurm.launch import run_on_slurm
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.train import worker

sys.path.append(str(Path(__file__).parents[1] / "tests" / "slurm"))

from cluster import PACKAGES, missing_programs
from cluster import Cluster as EmulatedCluster

CORES = len(os.sched_getaffinity(0))
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def pool_jobs(root: Path, specs: list[RunSpec]) -> None:
    """Launch through this project: a pool job for each node."""
    launcher = Slurm(name="slurm", device="cpu", jobs=CORES)
    cluster = Cluster(nodes=CORES, devices_per_node=1)
    ours = [
        replace(spec, config=replace(spec.config, launcher=launcher, cluster=cluster))
        for spec in specs
    ]
    with Path(os.devnull).open("w") as nowhere:
        result = run_on_slurm(ours, SweepFolder(root), console=Console(file=nowhere))
    if result.failed:
        raise RuntimeError(result.failed[0].reason)


def one_job_a_run(root: Path, specs: list[RunSpec]) -> None:
    """Submit a job for each run, which starts Python and trains."""
    executor = submitit.AutoExecutor(folder=root / "submitit", cluster="slurm")
    executor.update_parameters(timeout_min=5, cpus_per_task=1)
    jobs = [executor.submit(worker.main, str(root / "runs" / s.run_id), 0) for s in specs]
    while not all(job.done() for job in jobs):
        time.sleep(0.5)
    if any(job.result() for job in jobs):
        raise RuntimeError("a run failed")


def hydra_submitit(root: Path, specs: list[RunSpec]) -> None:
    """Submit one array of jobs, as Hydra's multirun does."""
    command = [sys.executable, __file__, "--multirun", "hydra/launcher=submitit_slurm"]
    command += ["hydra.launcher.timeout_min=5", "hydra.launcher.cpus_per_task=1"]
    command += [f"hydra.sweep.dir={root}/hydra", f"+root={root}"]
    names = ",".join(spec.run_id for spec in specs)
    subprocess.run([*command, f"+name={names}"], check=True, stdout=subprocess.DEVNULL)


@hydra.main(version_base=None, config_path=None)
def hydra_job(config: DictConfig) -> None:
    """Train one run, as Hydra's job."""
    if worker.main(str(Path(config.root) / "runs" / config.name), 0):
        raise RuntimeError(config.name)


class Measured(NamedTuple):
    """What a run took of a node, in seconds: its share of the sweep from start to end."""

    whole_s: float
    overhead_s: float
    """Of that, what was not training."""


def measure(way: Callable[[Path, list[RunSpec]], None], specs: list[RunSpec]) -> Measured:
    """Have runs done in one way; print what they took."""
    # Where all nodes of a cluster would see it: not in a temporary folder of one of them.
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".slurm-throughput-") as folder:
        root = Path(folder)
        if way is not pool_jobs:
            for spec in specs:
                write_run(spec, root / "runs")
        began = time.perf_counter()
        way(root, specs)
        wall_s = time.perf_counter() - began
        trained_s = sum(training_time_s(root / "runs" / spec.run_id) for spec in specs)
    whole_s, trained_s = CORES * wall_s / len(specs), trained_s / len(specs)
    print(
        f"  {way.__name__:15s} {len(specs):4d} runs in {wall_s:5.1f} s; of a node, "
        f"{whole_s:.3f} s a run: {trained_s:.3f} s training, {whole_s - trained_s:.3f} s overhead",
        flush=True,
    )
    return Measured(whole_s, whole_s - trained_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--peer-runs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps a run")
    options = parser.parse_args()
    if missing := missing_programs():
        sys.exit(f"no {', '.join(missing)}: needs the Debian packages {PACKAGES}")
    os.environ.update(ENVIRONMENT)
    logging.disable()  # submitit warns of a cluster without accounting at every look
    specs = [make_run(f"run{number}", options.steps) for number in range(options.runs)]
    cluster = EmulatedCluster(nodes=CORES, gpus=0, cpus=1)
    try:
        os.environ.update(cluster.environment)
        print(f"{CORES} nodes with a core each; {options.steps} optimizer steps a run")
        ours = measure(pool_jobs, specs)
        for way in (one_job_a_run, hydra_submitit):
            peer = measure(way, specs[: options.peer_runs])
            print(
                f"ratio {way.__name__} / pool_jobs: {peer.whole_s / ours.whole_s:.1f} of all, "
                f"{peer.overhead_s / ours.overhead_s:.1f} of the overhead"
            )
    finally:
        cluster.close()


if __name__ == "__main__":
    if "--multirun" in sys.argv:
        hydra_job()
    else:
        main()
