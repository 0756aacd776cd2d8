"""Real runs on a CUDA device, launched as a sweep launches them."""

import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from batchscape.launch.child import WORKER
from batchscape.launch.launcher import Launcher
from batchscape.plan.machine import Machine
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus
from batchscape.record.tables import read_table


class Launched:
    """A run that has ended."""

    def __init__(self, sweep, run_id):
        self.folder = sweep.run(run_id)
        self.status = RunStatus.read(self.folder.status)
        self.launch = read_json(self.folder.launch)

    def table(self, name):
        """Return its steps, evals or ranks."""
        return read_table(self.folder, name)

    @property
    def log(self):
        """What its ranks printed."""
        return self.folder.log.read_text()


@pytest.fixture
def cuda_spec(spec_of):
    """`spec_of` for a run on CUDA, with its memory measured."""

    def make(geometry=(1, 32, 1), **overrides):
        settings = {"launcher__device": "cuda", "measure__memory": True, **overrides}
        return replace(spec_of(geometry, **settings), device_type="cuda")

    return make


@pytest.fixture
def launch(tmp_path):
    """Run specifications to their ends, in a folder of their own."""
    sys.path.insert(0, str(Path(__file__).parent))
    count = 0

    def start(*specs, entry=WORKER):
        nonlocal count
        count += 1
        sweep = SweepFolder(tmp_path / f"sweep-{count}")
        console = Console(file=StringIO())
        Launcher(sweep, Machine.detect(), specs, entry=entry, console=console).run()
        return [Launched(sweep, spec.run_id) for spec in specs]

    yield start
    sys.path.pop(0)


@pytest.fixture
def train(launch):
    """Run one specification, which must complete."""

    def start(spec, **options):
        (ended,) = launch(spec, **options)
        assert ended.status.status == "completed", f"{ended.status.reason}\n{ended.log}"
        return ended

    return start
