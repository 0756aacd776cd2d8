"""What `doctor` says of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster

from batchscape import doctor

pytestmark = pytest.mark.systems


def test_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    slurm, folder = doctor.slurm(tmp_path / "not" / "there")
    assert slurm.status == "ok"
    assert slurm.detail == "partitions: main*, low"
    # All nodes are this machine here.
    assert (folder.status, folder.detail) == ("missing", f"{tmp_path} is on a disk of this machine")
    assert not list(tmp_path.iterdir())
    for state in ("DOWN", "UP"):
        for partition in ("main", "low"):
            cluster.run("scontrol", "update", f"PartitionName={partition}", f"State={state}")
        found = next(doctor.slurm(tmp_path))
        assert found.status == ("broken" if state == "DOWN" else "ok")


def test_without_an_answer_or_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [*doctor.slurm(tmp_path)] == []
    for program in ("squeue", "sinfo"):
        (tmp_path / program).write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
        (tmp_path / program).chmod(0o755)
    (found,) = doctor.slurm(tmp_path)
    assert (found.status, found.detail) == ("broken", "sinfo failed: no controller")
    assert str(found.repair).startswith("try `scontrol ping`")
