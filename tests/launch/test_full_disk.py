"""Sweeps on a disk that becomes full: nothing written is lost, and the same command goes on."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweeps_of_fakes import MACHINE, spec_named

from batchscape.launch.launcher import Launcher
from batchscape.record.files import read_json_lines
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.state import verify_seal
from batchscape.record.status import RunStatus
from batchscape.record.tables import load

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from small_disk import with_small_disk

SIZE = 8 << 20


def launched(sweep: SweepFolder, *specs: RunSpec) -> dict[str, Any]:
    """Launch, and tell what came of it in plain values."""
    output = io.StringIO()
    result = Launcher(
        sweep,
        MACHINE,
        specs,
        console=Console(file=output),
        entry="disk_workers:main",
        method="spawn",
    ).run()
    statuses = {spec.run_id: RunStatus.read(sweep.run(spec.run_id).status) for spec in specs}
    return {
        "told": {run.run_id: str(run.status) for run in result.runs},
        "stopped": result.stopped,
        "printed": output.getvalue().replace("\n", " "),
        "status": {name: str(status.status) for name, status in statuses.items()},
        "attempts": {name: len(status.attempts) for name, status in statuses.items()},
    }


def twice(place: Path, *names: str) -> tuple[dict[str, Any], list[int], dict[str, Any], int]:
    """Launch fakes on a disk that they fill, make space, and launch them again."""
    sweep = SweepFolder(place / "sweep")
    specs = [spec_named(name) for name in names]
    first = launched(sweep, *specs)
    kept = [row["optimizer_step"] for row in read_json_lines(sweep.run(names[0]).lines("steps"))]
    (sweep.path / "filler").unlink()
    again = launched(sweep, *specs)
    for folder in sweep.run_folders():
        verify_seal(folder, RunStatus.read(folder.status))
    return first, kept, again, len(load(sweep.path).steps)


@pytest.mark.slow
def test_the_launcher_stops_and_the_same_command_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    names = ("writes", "completes-later")
    first, kept, again, rows = with_small_disk(place, SIZE, twice, place, *names)
    assert first["told"] == {"writes": "interrupted", "completes-later": "pending"}
    # There was no room to write down why.
    assert first["status"]["writes"] == "running"
    full = " cannot be written: No space left on device, 0 bytes free there"
    assert full in first["stopped"]
    assert "make space, then the same command goes on" in first["stopped"]
    assert "No space left on device" in first["printed"]
    assert kept[:2] == [1, 2]
    assert kept == list(range(1, len(kept) + 1))
    assert again["told"] == dict.fromkeys(names, "completed")
    assert again["stopped"] is None
    assert again["attempts"] == {"writes": 2, "completes-later": 1}
    assert rows >= 6


@pytest.mark.slow
def test_a_run_that_could_not_be_sealed_is_not_trained_again(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    names = ("seals", "completes-later")
    first, kept, again, rows = with_small_disk(place, SIZE, twice, place, *names)
    assert first["told"] == {"seals": "interrupted", "completes-later": "pending"}
    assert "No space left on device" in first["printed"]
    assert kept == [1, 2, 3]
    assert again["told"] == dict.fromkeys(names, "completed")
    assert again["attempts"] == dict.fromkeys(names, 1)
    assert rows == 6
