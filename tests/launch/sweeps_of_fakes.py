"""Runs whose names say how a fake worker shall behave, and what to look at afterwards."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from batchscape.config import RunConfig
from batchscape.geometry import solve
from batchscape.plan.machine import Machine
from batchscape.record.spec import DataIdentity, RunSpec, Stage

ENTRY = "fake_workers:main"
MACHINE = Machine(cpu_cores=2, cpu_name="a processor")


def spec_named(
    name: str,
    ranks: int | None = None,
    *,
    device_type: str = "cpu",
    seed: int | None = None,
    tracker: dict[str, Any] | None = None,
    **launcher: Any,
) -> RunSpec:
    """Return a run; `name` is a behaviour of `fake_workers`, a dash, and perhaps `d<ranks>`.

    One whose name ends in `-later` is in a later block of the launch order.
    """
    if ranks is None:
        digits = name.partition("-d")[2]
        ranks = int(digits) if digits else 1
    geometry = solve(data_parallel_size=ranks, micro_batch_size=4, gradient_accumulation_steps=1)
    config = RunConfig.from_mapping(
        {
            "batch": {"global_batch_size": 4 * ranks},
            "model": {"name": "gpt", "n_layers": 1, "n_heads": 1, "d_model": 8},
            "data": {"name": "stdlib"},
            "optimizer": {"name": "adamw", "learning_rate": 0.1},
            "schedule": {"name": "constant"},
            "scaling": {},
            "budget": {"optimizer_steps": 3},
            "evaluation": {},
            "engine": {"name": "ddp"},
            "loader": {},
            "checkpoint": {},
            "measure": {},
            "launcher": {"name": "local", "device": device_type, **launcher},
            "tracker": tracker or {"name": "none"},
            "seed": int(name.endswith("-later")) if seed is None else seed,
        }
    )
    return RunSpec(
        run_id=name,
        trajectory_id="t",
        sweep_name="fakes",
        stages=(Stage(3 * geometry.global_batch_size, geometry, config.optimizer),),
        device_type=device_type,
        precision="float32",
        evaluation_every_samples=None,
        data=DataIdentity("0", "/nowhere", 100, 10, 256, task="next_token"),
        config=config,
    )


def renamed(spec: RunSpec, run_id: str) -> RunSpec:
    """Return the same run under another name."""
    return dataclasses.replace(spec, run_id=run_id)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait up to a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def pids_in(folder: Path) -> dict[str, int]:
    """Return the processes that the fake ranks of a sweep or run have noted, by name."""
    return {
        str(path.relative_to(folder)): json.loads(path.read_text())["pid"]
        for path in folder.rglob("pid-*.json")
    }


def is_alive(pid: int) -> bool:
    """Whether a process still runs."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
