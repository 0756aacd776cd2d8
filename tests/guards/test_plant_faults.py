"""The planted faults can be planted: each stands once in its file, and its tests are there."""

import importlib.util
from pathlib import Path

HERE = Path(__file__).parent


def test_the_list_fits_the_tree():
    described = importlib.util.spec_from_file_location("plant_faults", HERE / "plant_faults.py")
    guards = importlib.util.module_from_spec(described)
    described.loader.exec_module(guards)
    faults = guards.read_faults()
    assert len(faults) > 50
    assert guards.misfits(faults, guards.ROOT) == []
