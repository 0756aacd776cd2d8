"""A real scheduler, asked."""

from __future__ import annotations

import pytest
from cluster import Cluster

from batchscape import scheduler
from batchscape.scheduler import JobState

pytestmark = pytest.mark.systems


def test_jobs_in_every_state_that_ends_without_cgroups(cluster: Cluster) -> None:
    first, second, third = cluster.nodes
    ended = {
        "completed": cluster.submit("true"),
        "failed": cluster.submit("exit 3"),
        "killed": cluster.submit("kill -9 $$"),
        "cancelled": cluster.submit("sleep 600"),
        "node_fail": cluster.submit("sleep 600", f"--nodelist={third}", "--no-requeue"),
        "preempted": cluster.submit(
            "sleep 600", "--partition=low", "--exclusive", f"--nodelist={second}", "--no-requeue"
        ),
    }
    # On the third node they would end with it, and wait behind what is pending.
    running = cluster.submit("sleep 600", f"--nodelist={first}")
    array = cluster.submit("sleep 600", "--array=1-2%1", f"--nodelist={first}")
    for name in ("cancelled", "node_fail", "preempted"):
        cluster.wait_for(ended[name], "RUNNING")
    pending = cluster.submit("true", "--nodes=3", "--exclusive")
    scheduler.cancel([ended["cancelled"], "1"])
    cluster.kill_node(third)
    cluster.lose(third)
    higher = cluster.submit("sleep 600", "--exclusive", f"--nodelist={second}")
    cluster.wait_for(higher, "RUNNING")
    cluster.wait_for(running, "RUNNING")
    cluster.wait_for(f"{array}_1", "RUNNING")
    asked = [*ended.values(), running, pending, f"{array}_1", f"{array}_2", "1"]
    found = scheduler.jobs(asked)
    states = {name: found[job].state for name, job in ended.items()}
    assert states == {
        **{name: JobState(name) for name in ended if name != "killed"},
        "killed": JobState.FAILED,
    }
    assert found[ended["failed"]].reason == "NonZeroExitCode"
    assert found[running].state is found[f"{array}_1"].state is JobState.RUNNING
    assert found[running].nodes == first
    assert found[pending].state is found[f"{array}_2"].state is JobState.PENDING
    assert found["1"].state is JobState.UNKNOWN
    own = cluster.run("squeue", "--noheader", f"--jobs={array}_1", "--format=%A").strip()
    assert scheduler.jobs([own])[own].state is JobState.RUNNING
    cluster.restore()
