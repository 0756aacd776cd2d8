"""Real runs on a CUDA device, launched as a sweep launches them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from batchscape.launch.child import WORKER
from batchscape.launch.launcher import Launcher
from batchscape.plan.machine import Machine
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus
from batchscape.record.tables import read_table


class Launched:
    """A run that has ended."""

    def __init__(self, sweep: SweepFolder, run_id: str) -> None:
        self.folder = sweep.run(run_id)
        self.status = RunStatus.read(self.folder.status)
        self.launch: dict[str, Any] = read_json(self.folder.launch)

    def table(self, name: str) -> Any:
        """Return its steps, evals or ranks."""
        return read_table(self.folder, name)

    @property
    def log(self) -> str:
        """What its ranks printed."""
        return self.folder.log.read_text()


@pytest.fixture
def cuda_spec(spec_of: Callable[..., RunSpec]) -> Callable[..., RunSpec]:
    """`spec_of` for a run on CUDA, with its memory measured."""

    def make(geometry: tuple[int, int, int] = (1, 32, 1), **overrides: Any) -> RunSpec:
        settings = {"launcher__device": "cuda", "measure__memory": True, **overrides}
        return replace(spec_of(geometry, **settings), device_type="cuda")

    return make


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., list[Launched]]]:
    """Run specifications to their ends, in a folder of their own."""
    sys.path.insert(0, str(Path(__file__).parent))
    count = 0

    def start(*specs: RunSpec, entry: str = WORKER) -> list[Launched]:
        nonlocal count
        count += 1
        sweep = SweepFolder(tmp_path / f"sweep-{count}")
        console = Console(file=StringIO())
        Launcher(sweep, Machine.detect(), specs, entry=entry, console=console).run()
        return [Launched(sweep, spec.run_id) for spec in specs]

    yield start
    sys.path.pop(0)


@pytest.fixture
def train(launch: Callable[..., list[Launched]]) -> Callable[[RunSpec], Launched]:
    """Run one specification, which must complete."""

    def start(spec: RunSpec, **options: Any) -> Launched:
        (ended,) = launch(spec, **options)
        assert ended.status.status == "completed", f"{ended.status.reason}\n{ended.log}"
        return ended

    return start
