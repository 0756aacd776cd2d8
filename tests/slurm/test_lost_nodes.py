"""A node dies under a run, on a file system without locks.

`sitecustomize`, which Python imports first, has `fcntl.flock` fail with ENOLCK for files
of the sweep, in the follower and in all jobs.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from cluster import Cluster
from test_launch import (
    LONG,
    STEPS,
    arguments,
    at_work,
    in_background,
    started,
    statuses,
    sweep,
    until,
)

from batchscape.record.folder import SweepFolder
from batchscape.record.status import Status
from batchscape.record.tables import read_table

__all__ = ["started", "sweep"]  # fixtures
pytestmark = pytest.mark.systems

WITHOUT_LOCKS = """
import errno, fcntl, os
flock = fcntl.flock
def refuse(file, operation):
    number = file if isinstance(file, int) else file.fileno()
    if "/a sweep/" in os.readlink(f"/proc/self/fd/{number}"):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    return flock(file, operation)
fcntl.flock = refuse
"""


def test_a_node_that_dies_loses_nothing_but_time(
    cluster: Cluster,
    sweep: SweepFolder,
    started: list[subprocess.Popen[str]],
    slow_ranks: Path,
) -> None:
    with (slow_ranks.parent / "sitecustomize.py").open("a") as customized:
        customized.write(WITHOUT_LOCKS)
    follower = in_background(started, sweep, *LONG)
    until(lambda: at_work(sweep))
    ((run, job),) = at_work(sweep).items()
    node = cluster.run("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
    until(lambda: sweep.run(run).checkpoint_step)
    at = time.monotonic()
    cluster.kill_node(node)
    cluster.lose(node)
    slow_ranks.unlink()
    told = follower.communicate(timeout=200)[0]
    print(f"followed to the end in {time.monotonic() - at:.0f} s: {follower.returncode}")
    if statuses(sweep)[run].status is not Status.COMPLETED:
        assert follower.returncode == 1, told
        again = [sys.executable, "-m", "batchscape", *arguments(sweep, *LONG)]
        done = subprocess.run(again, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, told + done.stdout + done.stderr
    status = statuses(sweep)[run]
    assert status.status is Status.COMPLETED
    assert status.attempts[-1].from_optimizer_step, "from its checkpoint"
    steps = read_table(sweep.run(run), "steps")["optimizer_step"].tolist()
    assert steps == list(range(1, STEPS + 1))
    assert not list(sweep.run(run).path.glob(".claim*"))
    cluster.restore()
