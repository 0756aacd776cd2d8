"""What `doctor` says of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster

from batchscape.doctor import cluster as probes
from batchscape.doctor.finding import Finding

pytestmark = pytest.mark.systems


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in found}


def test_a_cluster(cluster: Cluster) -> None:
    found = by_name(probes.slurm())
    assert list(found) == [
        "Slurm",
        "Slurm nodes",
        "Slurm GPUs",
        "Slurm accounting",
        "Slurm cgroups",
    ]
    assert found["Slurm"].status == "ok"
    assert found["Slurm"].detail.endswith(
        "cluster test, partitions: main* (no time limit), low (no time limit)"
    )
    assert found["Slurm nodes"].detail == "3 of 3 can be used: 16 cores and 16 GiB"
    assert found["Slurm GPUs"].detail == "3 nodes with 4"
    assert found["Slurm accounting"].status == found["Slurm cgroups"].status == "missing"
    node = cluster.nodes[1]
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=a fan is broken")
    lost = by_name(probes.slurm())["Slurm nodes"]
    cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert lost.status == "broken"
    assert (
        lost.detail == f"2 of 3 can be used: 16 cores and 16 GiB; {node} drained (a fan is broken)"
    )


def test_the_folder_of_sweeps(cluster: Cluster, tmp_path: Path) -> None:
    folder, clocks = probes.shared_folder(tmp_path / "not" / "there")
    # All nodes are this machine here.
    assert (folder.status, folder.detail) == ("missing", f"{tmp_path} is on a disk of this machine")
    assert clocks.status == "ok"
    assert not list(tmp_path.iterdir())
    assert cluster.nodes


def test_without_an_answer_or_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probes.slurm() == probes.shared_folder(tmp_path) == []
    for program in ("squeue", "scontrol"):
        (tmp_path / program).write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
        (tmp_path / program).chmod(0o755)
    (found,) = probes.slurm()
    assert (found.status, found.detail) == ("broken", "scontrol failed: no controller")
    assert str(found.repair).startswith("try `scontrol ping`")
