"""What `doctor` says of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchscape import doctor

pytestmark = pytest.mark.systems


@pytest.mark.usefixtures("cluster")
def test_a_cluster(tmp_path: Path) -> None:
    slurm, folder = doctor.slurm(tmp_path / "not" / "there")
    assert slurm.status == "ok"
    # All nodes are this machine here.
    assert (folder.status, folder.detail) == ("missing", f"{tmp_path} is on a disk of this machine")
    assert not list(tmp_path.iterdir())


def test_without_an_answer_or_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.slurm(tmp_path) == []
    (tmp_path / "squeue").write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    (found,) = doctor.slurm(tmp_path)
    assert (found.status, found.detail) == ("broken", "squeue failed: no controller")
    assert str(found.repair).startswith("try `scontrol ping`")
