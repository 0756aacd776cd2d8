"""A real Slurm for tests; see `cluster`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from cluster import PACKAGES, Cluster, missing_programs

WAITING = """
import os, time
from batchscape.record import heartbeat
beat = heartbeat.beat
def wait(phase, *arguments, **named):
    beat(phase, *arguments, **named)
    if phase == "data" and os.path.exists({file!r}):
        time.sleep(0.5)
heartbeat.beat = wait
"""


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
def slow_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: as long as it is there, the ranks of all jobs wait for their samples.

    So a run lives as long as a test wants it to, and computes little.
    """
    file = tmp_path / "slow"
    file.touch()
    (tmp_path / "sitecustomize.py").write_text(WAITING.format(file=str(file)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return file


@pytest.fixture
def cluster(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster as the test's own: all nodes idle, no jobs, its commands found."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, running_cluster.environment[name])
    running_cluster.restore()
    yield running_cluster
    running_cluster.cancel_all()
