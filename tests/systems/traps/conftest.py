"""Small programs of each training system, run as their users run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Any]]:
    """Return what a program found on a number of gloo ranks; each is run once."""

    @cache
    def run(program: str, ranks: int) -> dict[str, Any]:
        out = tmp_path_factory.mktemp(program) / f"{ranks}.json"
        script = PROGRAMS / f"{program}_program.py"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*torchrun, "--nproc_per_node", str(ranks), str(script), str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            cwd=out.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        content: dict[str, Any] = json.loads(out.read_text())
        assert content["ranks"] == ranks
        return content

    return run
