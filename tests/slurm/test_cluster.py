"""What the tests' own cluster must show for other tests to mean something."""

from __future__ import annotations

import multiprocessing
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from cluster import Cluster

pytestmark = pytest.mark.systems


def test_jobs_of_one_node_have_gpus_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    script = f'echo "$CUDA_VISIBLE_DEVICES" > {tmp_path}/$SLURM_JOB_ID; sleep 2'
    jobs = [cluster.submit(script, "--gres=gpu:2", "--nodelist=127.0.0.1") for _ in range(2)]
    for job in jobs:
        cluster.wait_for(job, "COMPLETED")
    assert sorted((tmp_path / job).read_text().strip() for job in jobs) == ["0,1", "2,3"]


def test_nodes_have_temporary_folders_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    script = f"srun --ntasks-per-node=1 sh -c 'echo \"$TMPDIR\" > {tmp_path}/$SLURMD_NODENAME'"
    cluster.wait_for(
        cluster.submit(f"{script}; echo $TMPDIR > {tmp_path}/batch", "--nodes=3"), "COMPLETED"
    )
    found = [(tmp_path / node).read_text().strip() for node in cluster.nodes]
    assert found == [f"{cluster.root}/scratch.{node}" for node in cluster.nodes]
    assert (tmp_path / "batch").read_text().strip() in found


def test_a_higher_partition_preempts(cluster: Cluster) -> None:
    low = cluster.submit("sleep 600", "--partition=low", "--nodes=3", "--exclusive")
    cluster.wait_for(low, "RUNNING")
    high = cluster.submit("sleep 1", "--nodes=1", "--exclusive")
    cluster.wait_for(high, "COMPLETED")
    assert cluster.wait_for(low, "RUNNING", "PENDING")


def test_a_killed_node_takes_its_jobs_along_and_no_others(cluster: Cluster, tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/$SLURMD_NODENAME; sleep 600"
    jobs = {
        node: cluster.submit(script, f"--nodelist={node}", "--no-requeue")
        for node in cluster.nodes[:2]
    }
    pids = {}
    for node, job in jobs.items():
        cluster.wait_for(job, "RUNNING")
        while not (tmp_path / node).exists() or not (tmp_path / node).read_text():
            time.sleep(0.05)
        pids[node] = int((tmp_path / node).read_text())
    cluster.kill_node(cluster.nodes[0])
    assert not psutil.pid_exists(pids[cluster.nodes[0]])
    assert psutil.pid_exists(pids[cluster.nodes[1]])
    cluster.lose(cluster.nodes[0])
    cluster.wait_for(jobs[cluster.nodes[0]], "NODE_FAIL")
    assert cluster.state(jobs[cluster.nodes[1]]) == "RUNNING"
    cluster.restore()


ANOTHER = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from cluster import Cluster
cluster = Cluster(nodes=1)
print(cluster.root, flush=True)
job = cluster.submit("kill -INT $$; sleep 600")  # ends only one that heeds it
print(cluster.wait_for(job, "FAILED", "CANCELLED"), flush=True)
"""


@pytest.mark.parametrize("way", ["closed", "killed"])
def test_another_cluster_beside_it_ends_with_its_owner(cluster: Cluster, way: str) -> None:
    end = "import time; time.sleep(600)" if way == "killed" else "cluster.close()"
    # Inherited by all that it starts, whatever becomes of it.
    mark = {"BATCHSCAPE_TEST_CLUSTER": f"{os.getpid()}-{way}"}
    with subprocess.Popen(
        [sys.executable, "-c", ANOTHER + end],
        env={**os.environ, **mark, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        root = Path(owner.stdout.readline().strip())
        assert root != cluster.root
        assert owner.stdout.readline().strip() == "FAILED"
        if way == "killed":
            owner.kill()
    assert root.exists() == (way == "killed")
    shutil.rmtree(root, ignore_errors=True)
    limit = time.monotonic() + 20
    while left := [p.name() for p in psutil.process_iter() if _has(p, mark)]:
        assert time.monotonic() < limit, left
        time.sleep(0.1)
    assert "is UP" in cluster.run("scontrol", "ping")


def _run_unprivileged(folder: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setgid(nobody.pw_gid)
    os.setuid(nobody.pw_uid)
    os.chdir("/")
    cluster = Cluster(nodes=2)
    job = cluster.submit(f"srun id --user --name > {folder}/name", "--nodes=2")
    cluster.wait_for(job, "COMPLETED")
    cluster.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.skipif(os.getuid() != 0, reason="everything is unprivileged here")
def test_it_runs_unprivileged() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # below none that only root may enter
        Path(folder).chmod(0o777)
        # Forked: the interpreter may lie where only root may read.
        process = multiprocessing.get_context("fork").Process(
            target=_run_unprivileged, args=(Path(folder),)
        )
        process.start()
        process.join()
        assert process.exitcode == 0
        assert (Path(folder) / "name").read_text().split() == ["nobody", "nobody"]


def _has(process: psutil.Process, mark: dict[str, str]) -> bool:
    try:
        return mark.items() <= process.environ().items()
    except psutil.Error:
        return False
