"""Every row of the table of traps has a test, and is of the versions that are installed."""

from __future__ import annotations

import ast
import re
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ROW = re.compile(
    r"^\| (?P<library>[\w-]+) (?P<version>[\d.]+) \| .+ \| .+ \| .+ \| "
    r"`(?P<file>\w+\.py)::(?P<test>\w+)` \|$"
)
LINES = [
    line
    for line in (ROOT / "docs" / "systems.md").read_text().splitlines()
    if line.startswith("| ") and "---" not in line and not line.startswith("| library")
]
ELSEWHERE = {"litgpt"}
"""Libraries that need a virtual environment of their own; their tests look at the version."""


@pytest.mark.parametrize("line", LINES)
def test_every_row_names_a_test_that_exists(line):
    row = ROW.fullmatch(line)
    assert row, line
    module = ast.parse((HERE / row["file"]).read_text())
    names = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    assert row["test"] in names


def test_every_trap_has_a_row():
    listed = {(row["file"], row["test"]) for row in map(ROW.fullmatch, LINES) if row}
    found = {
        (path.name, node.name)
        for path in HERE.glob("test_traps_*.py")
        if path.name != Path(__file__).name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert listed == found


@pytest.mark.systems
def test_versions_are_those_installed():
    stated = {(row["library"], row["version"]) for row in map(ROW.fullmatch, LINES) if row}
    own = {(library, number) for library, number in stated if library not in ELSEWHERE}
    # A local part, as of a build for one kind of device, is no version of its own.
    assert own == {(library, version(library).partition("+")[0]) for library, _ in own}
