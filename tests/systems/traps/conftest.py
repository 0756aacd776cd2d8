"""Small programs of each training system, run on ranks of gloo."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from forked_programs import run_torchrun
from warm_interpreter import WarmInterpreter

PROGRAMS = Path(__file__).parent / "programs"
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}


@pytest.fixture(scope="session")
def found(
    once: Callable[..., Path], warm_libraries: WarmInterpreter
) -> Callable[[str, int], dict[str, Any]]:
    """Return what a program found on a number of gloo ranks; each is run once."""

    @cache
    def read(program: str, ranks: int) -> dict[str, Any]:
        def run(folder: Path) -> None:
            folder.mkdir()
            script, out = PROGRAMS / f"{program}_program.py", str(folder / "found.json")
            run_torchrun(
                warm_libraries, script, out, ranks=ranks, folder=folder, environment=ON_CPU
            )

        text = (once(f"trap-{program}-{ranks}", run) / "found.json").read_text()
        content: dict[str, Any] = json.loads(text)
        assert content["ranks"] == ranks
        return content

    return read
