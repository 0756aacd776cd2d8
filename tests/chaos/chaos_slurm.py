"""A sweep on a cluster whose jobs, nodes and followers are killed at random moments.

`python tests/chaos/chaos_slurm.py --kills 50 --seed 0`: at the end every loss curve is that of a
sweep on this machine which nobody disturbed, and every run has one seal. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "slurm"), str(Path(__file__).parents[1])]

from cluster import Cluster

from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import read_table, verify_seal
from exact import assert_same_rows

SETTINGS = (
    *("model.n_layers=1", "model.d_model=32", "model.n_heads=2", "tracker=none"),
    *("data.sequence_length=32", "evaluation.samples=16", "evaluation.every_samples=null"),
    *("budget=optimizer_steps", "budget.optimizer_steps=700", "batch.global_batch_size=16"),
    *("batch.micro_batch_size=2,4,8", "seed=0,1", "launcher.device=cpu", "checkpoint.every_s=1"),
    "measure.noise_scale_every=null",
)
ON_SLURM = (
    *("launcher=slurm", "cluster.nodes=2", "cluster.devices_per_node=4"),
    *("+launcher.sbatch.gpus-per-node=4", "launcher.jobs=2"),
)
KINDS = ("job", "job without a word", "node", "follower")


class Chaos:
    """Kills what a sweep has on a cluster, and starts it again."""

    def __init__(self, cluster: Cluster, folder: Path, rng: random.Random) -> None:
        self._cluster, self._rng = cluster, rng
        self.sweep = SweepFolder(folder / "sweep")
        self._follower: subprocess.Popen[bytes] | None = None
        self._log = (folder / "log.txt").open("ab")
        self.kills: Counter[str] = Counter()

    def follow(self) -> None:
        """Start the command, unless it is at work."""
        if self._follower is None or self._follower.poll() is not None:
            command = [sys.executable, "-m", "batchscape", "sweep", *SETTINGS, *ON_SLURM]
            self._follower = subprocess.Popen(
                [*command, f"sweep_dir={self.sweep.path}"],
                stdout=self._log,
                stderr=self._log,
                env=self._cluster.environment,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill something that is there; a node is back after some seconds."""
        running = self._cluster.run("squeue", "--noheader", "--states=R", "--format=%i %N")
        jobs = [line.split() for line in running.splitlines()]
        kind = self._rng.choice(KINDS)
        if kind == "follower":
            assert self._follower is not None
            if self._follower.poll() is not None:
                return
            self._follower.send_signal(self._rng.choice([signal.SIGKILL, signal.SIGINT]))
            self._follower.wait()
        elif not jobs:
            return
        else:
            job, node = self._rng.choice(jobs)
            if kind == "job":
                self._cluster.run("scancel", job)
            elif kind == "job without a word":
                self._cluster.run("scancel", "--full", "--signal=KILL", job)
            else:
                self._cluster.kill_node(node)
                self._cluster.lose(node)
                self._cluster.start_node(node)
        self.kills[kind] += 1

    def is_done(self) -> bool:
        """Whether every run is completed."""
        runs = self.sweep.run_folders()
        found = [RunStatus.read(run.status) for run in runs if run.status.exists()]
        return len(found) == 6 and all(status.status is Status.COMPLETED for status in found)

    def close(self) -> None:
        """End the command."""
        if self._follower is not None:
            self._follower.kill()
            self._follower.wait()
        self._log.close()


def main() -> int:
    """Disturb a sweep, and compare its curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    order = parser.parse_args()
    rng, done = random.Random(order.seed), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="chaos-slurm-") as name:
        folder = Path(name)
        local = [sys.executable, "-m", "batchscape", "sweep", *SETTINGS, "launcher=local"]
        quiet = {"stdout": subprocess.DEVNULL, "env": dict(os.environ)}
        subprocess.run([*local, f"sweep_dir={folder / 'calm'}"], check=True, **quiet)  # type: ignore[call-overload]
        cluster, part = Cluster(), 0
        try:
            while sum(done.values()) < order.kills:
                part += 1
                place = folder / str(part)
                place.mkdir()
                chaos = Chaos(cluster, place, rng)
                end = time.monotonic() + 900
                while not chaos.is_done():
                    if time.monotonic() > end:
                        print((place / "log.txt").read_text()[-5000:], file=sys.stderr)
                        return 1
                    chaos.follow()
                    time.sleep(rng.uniform(2.0, 8.0))
                    if sum((done + chaos.kills).values()) < order.kills:
                        chaos.kill()
                chaos.close()
                done += chaos.kills
                cluster.restore()
                _compare(SweepFolder(folder / "calm"), chaos.sweep)
                print(f"sweep {part}: all curves as undisturbed; kills so far: {dict(done)}")
        finally:
            cluster.close()
    return 0


def _compare(calm: SweepFolder, disturbed: SweepFolder) -> None:
    for run in calm.run_folders():
        found = disturbed.run(run.path.name)
        verify_seal(found, RunStatus.read(found.status))
        columns = ["optimizer_step", "samples", "loss", "grad_norm"]
        expected = read_table(run, "steps")
        columns = [name for name in columns if name in expected]
        assert_same_rows(read_table(found, "steps")[columns], expected[columns])
        assert not list(found.path.glob(".claim*")), found.path


if __name__ == "__main__":
    sys.exit(main())
