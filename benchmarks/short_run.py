"""The same short training run for every benchmark: one CPU rank, a small transformer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchscape.config import RunConfig
from batchscape.data.corpus import prepare
from batchscape.geometry import solve
from batchscape.record.files import write_json
from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec, Stage

__all__ = ["make_run", "training_time_s", "write_run"]


def make_run(name: str, optimizer_steps: int, **model: int) -> RunSpec:
    """Return a run of `optimizer_steps` steps of 8 samples."""
    settings: dict[str, Any] = {
        "batch": {"global_batch_size": 8, "micro_batch_size": 8},
        "model": {"name": "gpt", "n_layers": 2, "n_heads": 2, "d_model": 32, **model},
        "data": {"name": "stdlib", "sequence_length": 64},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        "schedule": {"name": "constant"},
        "scaling": {},
        "budget": {"optimizer_steps": optimizer_steps},
        "evaluation": {"samples": 8},
        "engine": {"name": "ddp", "precision": "float32"},
        "loader": {},
        "checkpoint": {"every_s": None},
        "measure": {"memory": False, "noise_scale_every": None},
        "launcher": {"name": "local", "device": "cpu"},
        "tracker": {"name": "none"},
    }
    config = RunConfig.from_mapping(settings)
    geometry = solve(data_parallel_size=1, micro_batch_size=8, global_batch_size=8)
    return RunSpec(
        run_id=name,
        trajectory_id=name,
        sweep_name="benchmark",
        stages=(Stage(8 * optimizer_steps, geometry, config.optimizer),),
        device_type="cpu",
        precision="float32",
        evaluation_every_samples=None,
        data=prepare(config.data),
        config=config,
    )


def write_run(spec: RunSpec, root: Path) -> Path:
    """Write what a worker reads, for launchers that know nothing of run folders."""
    folder = RunFolder(root / spec.run_id)
    spec.write(folder.config)
    launch = {
        "attempt": 0,
        "world_size": 1,
        "device_type": "cpu",
        "devices": [0],
        "threads_per_rank": 1,
        "rendezvous": "",
    }
    write_json(folder.launch, launch)
    return folder.path


def training_time_s(folder: Path) -> float:
    """Return the time of a run's optimizer steps and evaluations, as its worker wrote it."""
    run = RunFolder(folder)
    if run.parquet("steps").exists():
        summary = json.loads(run.status.read_text())["summary"]
        return float(summary["train_time_s"]) + float(summary["evaluation_s"])
    last = json.loads(run.lines("steps").read_text().splitlines()[-1])
    rank = json.loads(run.lines("ranks").read_text().splitlines()[-1])
    return float(last["train_time_s"]) + float(rank["evaluation_s"])
