"""`batchscape probe`: real trainings under a real limit of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchscape.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="holds processes to a limit")
SMALL = ("data.sequence_length=64", "batch.global_batch_size=96", "device.memory_limit_gib=0.12")


def probe(folder: Path, *settings: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "batchscape", "probe", "--json", *settings]
    told = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(told.stdout)
    return found


@pytest.mark.slow
def test_the_boundary_is_seen_from_both_sides_and_known_the_next_time(tmp_path: Path) -> None:
    found = probe(tmp_path, *SMALL)
    micros = found["candidates"]
    assert micros == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]
    fits = {one["micro_batch_size"]: one["fits"] for one in found["tried"]}
    largest = found["largest"]["micro_batch_size"]
    assert largest * found["largest"]["gradient_accumulation_steps"] == 96
    assert fits[largest] is True
    assert fits[micros[micros.index(largest) + 1]] is False
    assert all(one["taken_gib"] <= 0.12 for one in found["tried"] if one["fits"])
    predicted = found["predicted_gib"]
    assert predicted == sorted(predicted)
    (sweep,) = (tmp_path / "outputs").iterdir()
    before = {path: path.stat().st_mtime_ns for path in sweep.glob("runs/*/status.json")}
    assert len(before) == len(fits)
    again = probe(tmp_path, *SMALL)
    assert again["largest"] == found["largest"]
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
def test_all_fit_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("data.sequence_length=32", "batch.global_batch_size=4")
    assert main(["probe", *short, "device.memory_limit_gib=2"]) == 0
    assert "all fit; the largest is 4" in capsys.readouterr().out
    assert main(["probe", *short, "device.memory_limit_gib=0.0001"]) == 0
    assert "not even 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "give a device.memory_limit_gib"),
        (("seed=0,1", "device.memory_limit_gib=1"), "one combination of settings; given 2"),
        (
            ("batch.data_parallel_size=3", "device.memory_limit_gib=1"),
            "global_batch_size",
        ),
    ],
)
def test_refusals(
    settings: tuple[str, ...], said: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["probe", *settings]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()
