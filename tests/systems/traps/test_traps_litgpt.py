"""Traps of LitGPT: floored accumulation, schedules in micro-iterations, what is left at the end."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-litgpt" / "bin" / "python"
PROGRAM = Path(__file__).parent / "programs" / "litgpt_program.py"

pytestmark = [
    pytest.mark.systems,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-litgpt, which make systems makes"),
]


@pytest.fixture(scope="module")
def pretrained(once: Callable[..., Path]) -> dict[str, Any]:
    def run(folder: Path) -> None:
        folder.mkdir()
        done = subprocess.run(
            [str(PYTHON), str(PROGRAM), str(folder / "found.json")],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]

    content: dict[str, Any] = json.loads((once("litgpt", run) / "found.json").read_text())
    assert f"| litgpt {content['version']} |" in (ROOT / "docs" / "systems.md").read_text()
    return content


def test_a_global_batch_of_18_by_4_runs_as_16(pretrained):
    """72 samples are four optimizer steps of 18, and four of 16 that leave 8 unused."""
    assert pretrained["18 by 4"]["global_batches"] == [16] * 4


def test_learning_rates_depend_on_the_accumulation(pretrained):
    """Ten optimizer steps of 8 samples, warm-up of 4 steps to a learning rate of 1."""
    whole, in_four = pretrained["whole"], pretrained["in four"]
    assert whole["global_batches"] == in_four["global_batches"] == [8] * 10
    assert whole["learning_rates"][:5] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert in_four["learning_rates"][:4] == [0.1875, 0.4375, 0.6875, 0.9375]
    apart = zip(whole["learning_rates"], in_four["learning_rates"], strict=True)
    assert max(abs(a - b) for a, b in apart) == pytest.approx(0.1913, abs=5e-5)


def test_an_accumulation_that_is_cut_short_is_dropped(pretrained):
    """12 samples of a global batch of 8: the last 4 are read, and never reach an update."""
    assert pretrained["cut short"]["global_batches"] == [8]
