"""Programs to sweep: plain Python scripts in a folder of their own, and plans of them."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from batchscape.config import RunConfig
from batchscape.data.corpus import prepare
from batchscape.launch.launcher import Launcher
from batchscape.launch.result import SweepResult
from batchscape.plan.build import Plan, make_plan
from batchscape.plan.expand import Cell, SweepCells
from batchscape.plan.machine import Machine
from batchscape.record.folder import SweepFolder

MACHINE = Machine(cpu_cores=2, cpu_name="a processor")


def settings_of(**overrides: Any) -> dict[str, Any]:
    """Return the settings of a command; `group__name=value` overrides one."""
    mapping: dict[str, Any] = {
        "batch": {"data_parallel_size": 1, "micro_batch_size": 2, "global_batch_size": 8},
        "model": {"name": "external"},
        "data": {"name": "external"},
        "optimizer": {"name": "adamw", "learning_rate": 0.1},
        "schedule": {"name": "constant"},
        "scaling": {},
        "budget": {"optimizer_steps": 4},
        "evaluation": {},
        "engine": {"name": "command", "argv": ["{python}"], "metrics": {"kind": "recorder"}},
        "loader": {},
        "checkpoint": {},
        "measure": {"warmup_optimizer_steps": 1},
        "launcher": {"name": "local", "device": "cpu"},
        "tracker": {"name": "none"},
    }
    for name, value in overrides.items():
        group, _, key = name.partition("__")
        if key:
            mapping[group][key] = value
        else:
            mapping[group] = value
    return mapping


def plan_cells(
    *cells: dict[str, Any], swept: tuple[str, ...] = (), fixed: tuple[str, ...] = ()
) -> Plan:
    """Plan cells that differ in `swept`, on two cores."""
    grid = SweepCells(
        cells=[Cell(settings, {}) for settings in cells],
        axis_keys=frozenset(swept),
        fixed=dict.fromkeys(fixed, 0),
        sweep_file=None,
    )
    return make_plan(grid, MACHINE, prepare)


@pytest.fixture
def settings() -> Callable[..., dict[str, Any]]:
    """`settings_of`."""
    return settings_of


@pytest.fixture
def plan() -> Callable[..., Plan]:
    """`plan_cells`."""
    return plan_cells


@pytest.fixture
def config() -> Callable[..., RunConfig]:
    """Return a validated configuration of a command."""
    return lambda **overrides: RunConfig.from_mapping(settings_of(**overrides))


class Sweep:
    """A folder with a script, and the sweeps of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = SweepFolder(path / "sweep")
        self.printed = ""

    def script(self, text: str, name: str = "train.py") -> str:
        """Write a script; return its name."""
        (self.path / name).write_text(text)
        return name

    def settings(self, *arguments: str, **overrides: Any) -> dict[str, Any]:
        """Return the settings of the script with arguments."""
        argv = ["{python}", "train.py", *arguments]
        mapping = settings_of(**overrides)
        mapping["engine"] = {"argv": argv, "cwd": str(self.path), **mapping["engine"]}
        mapping["engine"]["argv"] = argv
        return mapping

    def run(self, *cells: dict[str, Any], **options: Any) -> SweepResult:
        """Plan and run cells."""
        planned = plan_cells(*cells)
        output = io.StringIO()
        result = Launcher(
            self.folder, MACHINE, planned.specs, console=Console(file=output, width=300), **options
        ).run()
        self.printed = output.getvalue()
        return result


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """A folder for a script and its sweeps, with no other launcher on the machine."""
    machine = tmp_path / "machine"
    machine.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(machine))
    return Sweep(tmp_path)
