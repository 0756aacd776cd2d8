"""The planted faults can be planted: each stands once in its file, and its tests are there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

HERE = Path(__file__).parent


def test_the_list_fits_the_tree() -> None:
    described = importlib.util.spec_from_file_location("plant_faults", HERE / "plant_faults.py")
    assert described is not None
    assert described.loader is not None
    guards = importlib.util.module_from_spec(described)
    described.loader.exec_module(guards)
    faults = guards.read_faults()
    assert len(faults) > 50
    assert guards.misfits(faults, guards.ROOT) == []
