"""Traps of `accelerate`: its accumulation, its schedule, the end of its loader, its launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.systems

PROGRAM = Path(__file__).parent / "programs" / "world_program.py"


def test_accelerate_takes_the_mean_of_means(found):
    it = found("accelerate", 2)
    assert it["mean of means"]["as predicted"] < 1e-12
    assert it["mean of means"]["error"] == pytest.approx(0.0381, abs=5e-5)
    assert it["right"]["error"] < 1e-12


def test_a_prepared_schedule_steps_once_a_process(found):
    it = found("accelerate", 2)
    assert it["schedule"]["prepared"] == 2 * it["optimizer_steps"]
    assert it["schedule"]["where gradients are exchanged"] == it["optimizer_steps"] == 5


def test_an_unprepared_schedule_steps_once_a_micro_step(found):
    it = found("accelerate", 2)
    steps = it["accumulation"] * it["optimizer_steps"]
    assert it["schedule"]["in every micro-step"] == steps == 10


def test_the_end_of_a_loader_forces_a_small_and_weak_step(found):
    """Six micro-steps an epoch, accumulation 4, gradients of exactly one."""
    it = found("accelerate", 2)
    assert it["window"] == {"optimizer_steps": 4, "gradients": [1.0, 0.5, 1.0, 0.5]}
    assert it["window off"] == {"optimizer_steps": 3, "gradients": [1.0, 1.0, 1.0]}


def test_unguarded_clipping_clips_every_micro_step(found):
    it = found("accelerate", 2)
    assert it["clipped in every micro-step"]["error"] == pytest.approx(0.134, abs=5e-4)
    assert it["clipped once"]["error"] < 1e-5


def test_accelerate_launch_on_cpu_runs_one_process_without_a_word(found, tmp_path):
    launch = Path(sys.executable).with_name("accelerate")
    out = tmp_path / "world"
    done = subprocess.run(
        [str(launch), "launch", "--cpu", "--num_processes", "2", str(PROGRAM), str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "num_processes" not in done.stdout + done.stderr
    assert json.loads(out.read_text())["ranks"] == 1
    assert found("world", 2)["ranks"] == 2
