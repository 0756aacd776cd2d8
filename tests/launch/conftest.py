"""Sweeps of fake workers: real processes that misbehave on purpose."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launchers import Elsewhere

from warm_interpreter import WarmInterpreter


@pytest.fixture(autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other launchers of this machine are not those of the test."""
    folder = str(tmp_path_factory.mktemp("machine"))
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv("TMPDIR", folder)


@pytest.fixture(autouse=True)
def _no_process_left(warm_interpreter: list[WarmInterpreter]) -> Iterator[None]:
    """Whatever a test did, nothing that a rank started may outlive it."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    # It starts with the first sweep that is launched in this process, and serves all.
    before |= {warm.pid for warm in warm_interpreter}
    survivors = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    # Killed ones may take a moment to go.
    _, alive = psutil.wait_procs(survivors, timeout=5)
    assert [p.cmdline() for p in alive] == []


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Elsewhere]]:
    """Start launchers on one sweep folder; those that still live are killed at the end."""
    made: list[Elsewhere] = []

    def start(method: str, *names: str) -> Elsewhere:
        made.append(Elsewhere(tmp_path / "sweep", method, *names, log=str(len(made))))
        return made[-1]

    yield start
    for launcher in made:
        launcher.end()
