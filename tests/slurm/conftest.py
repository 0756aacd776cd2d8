"""A real Slurm for tests; see `cluster`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from cluster import PACKAGES, Cluster, missing_programs


def require_slurm() -> None:
    """Skip a test where there is no Slurm, unless it must not be skipped."""
    missing = missing_programs()
    if missing:
        reason = f"no {', '.join(missing)}: needs the Debian packages {PACKAGES}"
        assert os.environ.get("BATCHSCAPE_REQUIRE_SYSTEMS") != "1", reason
        pytest.skip(reason)


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """Three nodes with 4 fake GPUs each, for the tests of one process."""
    require_slurm()
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster as the test's own: all nodes idle, no jobs, its commands found."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, running_cluster.environment[name])
    running_cluster.restore()
    yield running_cluster
    running_cluster.cancel_all()
