"""Small programs of each training system, run on ranks of gloo."""

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

SYSTEMS = Path(__file__).parents[1]
ALL_PROGRAMS = Path(__file__).parent / "programs" / "all_programs.py"


@pytest.fixture(scope="session")
def found(once: Callable[..., Path]) -> Callable[[str, int], dict[str, Any]]:
    """Return what a program found on a number of gloo ranks; each is run once."""

    def run_all(folder: Path) -> None:
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, str(ALL_PROGRAMS), str(folder)],
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
            | {"PYTHONPATH": os.pathsep.join([str(SYSTEMS), *sys.path])},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]

    @cache
    def read(program: str, ranks: int) -> dict[str, Any]:
        text = (once("traps", run_all) / f"{program}-{ranks}.json").read_text()
        content: dict[str, Any] = json.loads(text)
        assert content["ranks"] == ranks
        return content

    return read
