"""What a plan says of the disk, against models that are built and folders that are written."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from batchscape.launch import run_sweep
from batchscape.plan.disk_use import (
    DiskUse,
    describe_disk_use,
    disk_use,
    run_disk_use,
)
from batchscape.plan.machine import Machine
from batchscape.plan.parameters import count_parameters
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import Status

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from small_disk import with_small_disk

ACCURACY = 1.5
"""Factor within which the estimate of a run with a model of ours has to be."""

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": {"name": "gpt", "n_layers": 3, "n_heads": 2, "d_model": 24}},
    "wide vocabulary": {
        "model": {"name": "gpt", "n_layers": 1, "n_heads": 2, "d_model": 8, "vocabulary_size": 999}
    },
    "llama": {
        "model": {
            "name": "llama", "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_model": 32, "d_ff": 80
        }
    },
    "tied llama": {
        "model": {
            "name": "llama", "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "d_model": 16,
            "d_ff": 40, "tie_embeddings": True,
        }
    },
    "mlp": {"model": {"name": "mlp", "hidden_sizes": [20, 30]}, "data": {"name": "digits"}},
    "linear": {"model": {"name": "mlp", "hidden_sizes": []}, "data": {"name": "digits"}},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model_that_is_built(
    spec_of: Callable[..., RunSpec], name: str
) -> None:
    from batchscape.models.build import build_model

    spec = spec_of((1, 4, 1), **MODELS[name])
    built = build_model(spec.config, spec.data, spec.precision)
    expected = sum(parameter.numel() for parameter in built.parameters())
    assert count_parameters(spec.config, spec.data) == expected


def test_checkpoints_have_the_size_that_is_said(
    spec_of: Callable[..., RunSpec], tmp_path: Path
) -> None:
    """A checkpoint of the real engine, for each optimizer."""
    import torch

    from batchscape.engines import build_engine
    from batchscape.train.checkpoint import save_checkpoint

    for number, optimizer in enumerate(("adamw", "sgd", "muon")):
        spec = spec_of(
            (1, 4, 1),
            **MODELS["gpt"],
            optimizer={"name": optimizer, "learning_rate": 0.01},
            engine__precision="float32",
        )
        engine = build_engine(spec, torch.device("cpu"))
        ids = torch.zeros((4, 32), dtype=torch.int64)
        engine.micro_step(ids, ids, 1.0, last=True)
        engine.optimizer_step(spec.stages[0].optimizer, 1.0)
        state = {"rng": [torch.get_rng_state()], **engine.state(), "average": None}
        path = save_checkpoint(tmp_path / str(number), 1, state)
        said = run_disk_use(spec).checkpoint
        assert said is not None
        assert 1 / ACCURACY < said / path.stat().st_size < ACCURACY, optimizer
        engine.close()


@pytest.mark.slow
def test_a_sweep_takes_what_the_plan_says(
    spec_of: Callable[..., RunSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of all files of two runs at once, looked at all the time by a thread of the test."""
    machine = tmp_path / "machine"
    machine.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(machine))
    settings = {
        "engine__precision": "float32",
        "budget__optimizer_steps": 60,
        "checkpoint__every_s": 0.0,
        "evaluation__every_samples": 640,
        "launcher__concurrent_runs": 2,
    }
    spec = spec_of((1, 16, 2), **settings)
    other = dataclasses.replace(spec, run_id="other")
    sweep = SweepFolder(tmp_path / "sweep")
    said = disk_use([spec, other], sweep)
    ended = threading.Event()
    found = [0]

    def look() -> None:
        while not ended.wait(0.001):
            found[0] = max(found[0], size_of(sweep.path))

    looking = threading.Thread(target=look)
    looking.start()
    result = run_sweep(
        [spec, other],
        sweep,
        Machine(cpu_cores=2, cpu_name="a processor"),
        console=Console(file=io.StringIO()),
    )
    ended.set()
    looking.join()
    assert result.counts == {Status.COMPLETED: 2}
    reserve = 1 << 18
    assert 1 / ACCURACY < said.total / size_of(sweep.path) < ACCURACY
    # The thread may miss a peak, and no run need be at its own while the other is.
    assert (found[0] - reserve) / ACCURACY < said.peak < (found[0] - reserve) * 2 * ACCURACY
    assert disk_use([spec, other], sweep).runs == 0
    assert "nothing is left" in describe_disk_use(disk_use([spec, other], sweep))


def size_of(folder: Path) -> int:
    """Sum up the files of a folder; what is renamed or removed meanwhile counts for nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118  (a tight loop)
    return total


@pytest.mark.slow
def test_more_at_once_take_more(spec_of: Callable[..., RunSpec], tmp_path: Path) -> None:
    def peak_of(**settings: Any) -> DiskUse:
        spec = spec_of((1, 16, 2), **settings)
        return disk_use(
            [dataclasses.replace(spec, run_id=str(n)) for n in range(4)], SweepFolder(tmp_path)
        )

    one, two = peak_of(), peak_of(launcher__concurrent_runs=2)
    assert one.total == two.total
    assert two.peak - two.total == 2 * (one.peak - one.total)
    assert two.fits


def planned(place: Path, spec: RunSpec) -> str:
    sweep = SweepFolder(place / "not" / "there" / "yet")
    return describe_disk_use(disk_use([spec], sweep))


def test_what_does_not_fit_is_said_before(spec_of: Callable[..., RunSpec], tmp_path: Path) -> None:
    place = tmp_path / "disk"
    spec = spec_of((1, 16, 2), budget__optimizer_steps=5000)
    text = with_small_disk(place, 1 << 20, planned, place, spec)
    assert "Free: 1.0 MiB. That does not fit: make space" in text
    assert "a run keeps its newest 2 until it is sealed" in text
    assert "That does not fit" not in planned(tmp_path, spec)
