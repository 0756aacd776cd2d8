"""`make gpu` where there is no CUDA device: a word, code 0, and nothing written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
]


def listed(folder):
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_without_a_device_nothing_is_run():
    before = listed(ROOT / "benchmarks")
    done = run("make", "--no-print-directory", "gpu", f"GPU_PYTHON={sys.executable}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "make gpu: no CUDA device here; nothing was run\n"
    assert listed(ROOT / "benchmarks") == before


@pytest.mark.parametrize("benchmark", ["gpt2_step_time", "adamw_kernels", "recorder_overhead_cuda"])
def test_a_benchmark_without_a_device_says_so(benchmark):
    before = listed(ROOT / "benchmarks")
    done = run(sys.executable, f"benchmarks/gpu/{benchmark}.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "no CUDA device here; nothing was measured\n"
    assert listed(ROOT / "benchmarks") == before


def test_an_interpreter_that_cannot_look_is_a_failure():
    assert run("make", "--no-print-directory", "gpu", "GPU_PYTHON=/bin/false").returncode != 0
