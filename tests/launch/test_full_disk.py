"""Sweeps on a disk that becomes full: nothing written is lost, and the same command goes on."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweeps_of_fakes import MACHINE, spec_named

from batchscape.launch import forkserver
from batchscape.launch.launcher import Launcher
from batchscape.record.files import read_json_lines
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus
from batchscape.record.tables import load, read_table, verify_seal
from warm_interpreter import WarmInterpreter

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from small_disk import with_small_disk

SIZE = 8 << 20
MEASURED = ["optimizer_step", "samples", "tokens", "loss", "learning_rate", "gradient_norm"]


def launched(
    sweep: SweepFolder, *specs: RunSpec, method: str = "spawn", **options: Any
) -> dict[str, Any]:
    """Launch, and tell what came of it in plain values."""
    output = io.StringIO()
    result = Launcher(
        sweep, MACHINE, specs, console=Console(file=output), method=method, **options
    ).run()
    statuses = {spec.run_id: RunStatus.read(sweep.run(spec.run_id).status) for spec in specs}
    return {
        "told": {run.run_id: str(run.status) for run in result.runs},
        "stopped": result.why_stopped,
        "printed": output.getvalue().replace("\n", " "),
        "status": {name: str(status.status) for name, status in statuses.items()},
        "attempts": {name: len(status.attempts) for name, status in statuses.items()},
    }


def twice(place: Path, *names: str) -> tuple[dict[str, Any], list[int], dict[str, Any], int]:
    """Launch fakes on a disk that they fill, make space, and launch them again."""
    sweep = SweepFolder(place / "sweep")
    specs = [spec_named(name) for name in names]
    first = launched(sweep, *specs, entry="disk_workers:main")
    kept = [row["optimizer_step"] for row in read_json_lines(sweep.run(names[0]).lines("steps"))]
    (sweep.path / "filler").unlink()
    again = launched(sweep, *specs, entry="disk_workers:main")
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


def train_on_a_disk_that_fills(place: Path, specs: list[RunSpec]) -> tuple[Any, ...]:
    # This is a process of its own, which the tests have given no warm interpreter.
    pytest.MonkeyPatch().setattr(
        forkserver, "start_interpreter", WarmInterpreter().start_interpreter
    )
    sweep = SweepFolder(place / "sweep")
    first = launched(sweep, *specs, method="fork", entry="disk_workers:trains")
    folder = sweep.run(specs[0].run_id)
    checkpoints = sorted(path.name for path in folder.checkpoints.iterdir())
    (sweep.path / "filler").unlink()
    again = launched(sweep, *specs, method="fork")
    curves = {
        table: [
            read_table(sweep.run(spec.run_id), table)[columns].to_dict("list") for spec in specs
        ]
        for table, columns in (("steps", MEASURED), ("evals", ["samples", "eval_loss"]))
    }
    attempts = read_table(folder, "steps")["attempt"].tolist()
    return first, checkpoints, again, curves, attempts


@pytest.mark.slow
def test_curves_of_a_full_disk_are_those_of_an_empty_one(
    tmp_path: Path, spec_of: Callable[..., RunSpec]
) -> None:
    settings = {
        "engine__precision": "float32",
        "model": {"name": "gpt", "n_layers": 1, "n_heads": 2, "d_model": 16, "dropout": 0.1},
        "data__sequence_length": 16,
        "budget__optimizer_steps": 80,
        "checkpoint__every_s": 0.0,
        "evaluation__every_samples": 640,
    }
    spec = spec_of((1, 16, 2), **settings)
    later = dataclasses.replace(
        spec, run_id="undisturbed", config=dataclasses.replace(spec.config, timing_repeat=1)
    )
    place = tmp_path / "disk"
    first, checkpoints, again, curves, attempts = with_small_disk(
        place, SIZE, train_on_a_disk_that_fills, place, [spec, later]
    )
    assert first["told"] == {spec.run_id: "interrupted", "undisturbed": "pending"}
    assert "No space left on device" in first["stopped"]
    (checkpoint,) = checkpoints
    assert checkpoint.endswith(".pt")
    assert again["told"] == {spec.run_id: "completed", "undisturbed": "completed"}
    # It went on from its only checkpoint.
    kept = int(checkpoint.split("-")[1])
    assert attempts == [0] * kept + [1] * (80 - kept)
    for resumed, uninterrupted in curves.values():
        # Lists of floats: equal here is equal bit for bit, as there is no NaN.
        assert resumed == uninterrupted
    assert len(curves["steps"][0]["loss"]) == 80
