"""Sweep folders written by the real writers, with rows whose figures a test can recompute."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchscape.config import RunConfig
from batchscape.geometry import BatchGeometry
from batchscape.plan.stages import scale_optimizer
from batchscape.record.files import JsonLines, write_json
from batchscape.record.folder import FORMAT_VERSION, RunFolder, SweepFolder
from batchscape.record.spec import DataIdentity, RunSpec, Stage
from batchscape.record.status import RunStatus, Status, StopReason
from batchscape.record.tables import seal

GPT = {"name": "gpt", "n_layers": 2, "n_heads": 4, "d_model": 128}
FORK = [(1, 32, 1), (4, 8, 1), (2, 8, 2), (1, 8, 4)]
CORES = 2


class SweepBuilder:
    """Writes runs into one sweep folder."""

    def __init__(self, path: Path, name: str, kept: dict[str, Path], kept_in: Path) -> None:
        self.folder = SweepFolder(path)
        self.name = name
        self._kept = kept
        self._kept_in = kept_in

    @property
    def path(self) -> Path:
        """The sweep folder."""
        return self.folder.path

    def run(self, geometry: tuple[int, int, int] = (1, 32, 1), **options: Any) -> RunFolder:
        """Write one run as `_write` does; one that any test had before is copied."""
        key = repr((self.name, geometry, sorted(options.items())))
        before = self._kept.get(key)
        if before is not None and not self.folder.run(before.name).path.exists():
            folder = self.folder.run(before.name)
            shutil.copytree(before, folder.path, copy_function=shutil.copy)  # as new
            return folder
        folder = self._write(geometry, **options)
        if "loss" not in options:  # of a curve, the key does not tell the content
            self._kept[key] = self._kept_in / str(len(self._kept)) / folder.path.name
            shutil.copytree(folder.path, self._kept[key])
        return folder

    def _write(
        self,
        geometry: tuple[int, int, int] = (1, 32, 1),
        *,
        seed: int = 0,
        status: str = "completed",
        reason: str | None = None,
        stop_reason: str | None = "budget",
        optimizer_steps: int = 40,
        done: int | None = None,
        rounding: float = 1e-7,
        loss: Callable[[np.ndarray], np.ndarray] | None = None,
        held_out: Callable[[np.ndarray], np.ndarray] | None = None,
        device_type: str = "cpu",
        hardware: str = "Example CPU",
        launched: bool = True,
        concurrent_runs: int = 1,
        core_wait: float = 0.0,
        slow_by: float = 1.0,
        evaluated: bool = True,
        ranks: dict[str, Any] | None = None,
        ramp: tuple[tuple[int, tuple[int, int, int]], ...] = (),
        ramp_factor: float = 1.0,
        noise: tuple[float, float] | None = None,
        task: str = "next_token",
        **settings: Any,
    ) -> RunFolder:
        """Write one run; `group__name=value` changes a setting.

        Warm-up and every fifth step take `slow_by` times as long.
        """
        devices, micro, accumulation = geometry
        cut = BatchGeometry(1, devices, micro, accumulation)
        config = self._config(cut, seed, optimizer_steps, settings)
        trajectory = {
            name: value
            for name, value in config.to_mapping().items()
            if name
            not in {
                *("batch", "cluster", "launcher", "tracker", "checkpoint", "measure", "device"),
                "search",
            }
        }
        trajectory["timing_repeat"] = 0
        # Curves are drawn from the name: a setting that no test varies must not draw others.
        trajectory["budget"] = {
            name: value
            for name, value in trajectory["budget"].items()
            if not name.startswith("divergence_")
        }
        factors = [] if ramp_factor == 1 else [ramp_factor]
        trajectory_id = _hash(trajectory, *ramp, *factors, cut.global_batch_size)
        limited = config.device.memory_limit_gib is not None
        limit = [config.device.memory_limit_gib] if limited else []
        spec = RunSpec(
            run_id=f"b{cut.global_batch_size}-d{devices}-m{micro}-a{accumulation}-s{seed}-"
            + _hash(trajectory_id, cut, device_type, config.timing_repeat, *limit),
            trajectory_id=trajectory_id,
            sweep_name=self.name,
            stages=(
                *(
                    Stage(
                        n,
                        BatchGeometry(1, *cut),
                        scale_optimizer(config.optimizer, config.scaling, prod(cut), ramp_factor),
                    )
                    for n, cut in ramp
                ),
                Stage(optimizer_steps * cut.global_batch_size, cut, config.optimizer),
            ),
            device_type=device_type,
            precision="float32",
            evaluation_every_samples=None,
            data=DataIdentity("0" * 16, "data", 10_000, 500, 256, task),
            config=config,
        )
        folder = self.folder.run(spec.run_id)
        spec.write(folder.config)
        outcome = RunStatus(
            Status(status),
            stop_reason=StopReason(stop_reason) if stop_reason and status == "completed" else None,
            reason=reason,
        )
        if status == "pending":
            outcome.write(folder.status)
            return folder
        if launched:
            _write_launch(folder, devices, device_type, hardware, concurrent_runs)
        _write_environment(folder)
        rng = np.random.default_rng([seed, devices, micro, accumulation])
        self._write_rows(
            folder,
            spec,
            done or optimizer_steps,
            rounding,
            loss,
            held_out,
            core_wait,
            slow_by,
            rng,
            ranks,
            noise,
        )
        if not evaluated:
            folder.lines("evals").unlink()
        if outcome.status.is_sealed:
            seal(folder, outcome, devices)
        else:
            outcome.write(folder.status)
        return folder

    def reject(
        self, geometry: tuple[int | None, ...], global_batch: int | None, reason: str, seed: int = 0
    ) -> RunFolder:
        """Write a cell that was never launched."""
        names = ("data_parallel_size", "micro_batch_size", "gradient_accumulation_steps")
        batch = {**dict(zip(names, geometry, strict=True)), "global_batch_size": global_batch}
        config = RunConfig.from_mapping({**self._mapping(seed, 40), "batch": batch})
        run_id = f"rejected-{_hash(batch, seed)}"
        folder = self.folder.run(run_id)
        write_json(
            folder.config,
            {
                "format_version": FORMAT_VERSION,
                "run_id": run_id,
                "trajectory_id": None,
                "sweep_name": self.name,
                "geometry": None,
                "resolved": None,
                "data": None,
                "config": config.to_mapping(),
            },
        )
        RunStatus(Status.REJECTED, reason=reason).write(folder.status)
        return folder

    def fork(self, seeds: tuple[int, ...] = (0, 1, 2)) -> SweepBuilder:
        """Write the four decompositions of 32 and two rejected cells, for each seed."""
        for seed in seeds:
            for geometry in FORK:
                self.run(geometry, seed=seed)
            for devices in (2, 4):
                reason = f"global_batch_size must be a multiple of {devices} x 32 (32 is not)"
                self.reject((devices, 32, None), 32, reason, seed)
        return self

    def _config(
        self, cut: BatchGeometry, seed: int, optimizer_steps: int, settings: dict[str, Any]
    ) -> RunConfig:
        mapping = self._mapping(seed, optimizer_steps)
        mapping["batch"] = {
            "data_parallel_size": cut.data_parallel_size,
            "micro_batch_size": cut.micro_batch_size,
            "global_batch_size": cut.global_batch_size,
        }
        for key, value in settings.items():
            group, _, name = key.partition("__")
            if name:
                mapping[group][name] = value
            else:
                mapping[group] = value
        return RunConfig.from_mapping(mapping)

    def _mapping(self, seed: int, optimizer_steps: int) -> dict[str, Any]:
        return {
            "batch": {},
            "model": dict(GPT),
            "data": {"name": "stdlib", "sequence_length": 64},
            "optimizer": {"name": "adamw", "learning_rate": 1e-3},
            "schedule": {"name": "constant"},
            "scaling": {},
            "loader": {},
            "budget": {"optimizer_steps": optimizer_steps},
            "evaluation": {},
            "engine": {"name": "ddp"},
            "checkpoint": {},
            "measure": {},
            "launcher": {"name": "local"},
            "tracker": {"name": "none"},
            "seed": seed,
        }

    def _write_rows(
        self,
        folder: RunFolder,
        spec: RunSpec,
        done: int,
        rounding: float,
        loss: Callable[[np.ndarray], np.ndarray] | None,
        held_out: Callable[[np.ndarray], np.ndarray] | None,
        core_wait: float,
        slow_by: float,
        rng: np.random.Generator,
        ranks: dict[str, Any] | None,
        noise: tuple[float, float] | None,
    ) -> None:
        cut, length = spec.geometry, spec.config.sequence_length or 1
        step = np.arange(1, done + 1)
        samples = step * cut.global_batch_size
        # Equal for all decompositions of one trajectory but for what stands for rounding.
        shared = np.random.default_rng(int(spec.trajectory_id, 16))
        jitter = shared.normal(0, 0.4 / np.sqrt(cut.global_batch_size), done)
        curve = 2.4 + 3.1 * np.exp(-samples / 400) + jitter if loss is None else loss(step)
        if (cut.data_parallel_size, cut.gradient_accumulation_steps) != (1, 1):
            curve = curve + rounding * np.sqrt(step) * rng.normal(size=done)
        slow = 0.004 + 0.0011 * cut.micro_batch_size * cut.gradient_accumulation_steps
        forward = slow * (1 + 0.03 * rng.random(done)) * max(1, cut.data_parallel_size / CORES)
        exchange = 0.002 * (cut.data_parallel_size > 1) * (1 + 0.1 * rng.random(done))
        update = 0.001 * (1 + 0.1 * rng.random(done))
        data = 0.0005 * (1 + 0.1 * rng.random(done))
        forward = forward * np.where((step <= 5) | (step % 5 == 0), slow_by, 1.0)
        total = forward + exchange + update + data
        _append(
            folder.lines("steps"),
            optimizer_step=step,
            samples=samples,
            tokens=samples * length,
            global_batch_size=np.full(done, cut.global_batch_size),
            train_time_s=np.cumsum(total),
            attempt=np.zeros(done, int),
            loss=curve,
            learning_rate=np.full(done, 1e-3),
            **_gradients(cut, done, noise, rng),
            step_time_s=total,
            data_s=data,
            forward_backward_s=forward,
            exchange_s=exchange,
            optimizer_s=update,
            exchange_span_s=2 * exchange,
            exchanged_bytes=np.full(done, 1000),
            core_wait_s=core_wait * total,
            warmup=step <= 5,
            skipped=np.zeros(done, bool),
        )
        when = np.unique(np.linspace(0, done, 5).astype(int))
        usual = 2.45 + 3.1 * np.exp(-when * cut.global_batch_size / 400)
        noisy = usual + 0.02 * shared.normal(size=len(when))
        classifies = spec.config.data.name == "digits"
        _append(
            folder.lines("evals"),
            optimizer_step=when,
            samples=when * cut.global_batch_size,
            tokens=when * cut.global_batch_size * length,
            train_time_s=np.concatenate([[0], np.cumsum(total)])[when],
            attempt=np.zeros(len(when), int),
            eval_loss=noisy if held_out is None else held_out(when),
            eval_accuracy=1 - usual / 6 if classifies else [None] * len(when),
            eval_labels=np.full(len(when), 500),
            evaluation_s=np.full(len(when), 0.01),
        )
        _write_ranks(folder, cut, rng, **(ranks or {}))


def _gradients(
    cut: BatchGeometry, done: int, noise: tuple[float, float] | None, rng: np.random.Generator
) -> dict[str, Any]:
    """Norms with tr(S) and |G|^2 as given, sampled in every fifth step; none sampled without."""
    if noise is None:
        return {"gradient_norm": np.ones(done)}
    trace, signal = noise
    square = {
        size: signal + trace / size * (1 + 0.05 * rng.normal(size=done))
        for size in (cut.global_batch_size, cut.micro_batch_size)
    }
    sampled = np.arange(1, done + 1) % 5 == 0
    small = square[cut.micro_batch_size]
    return {
        "gradient_norm": np.sqrt(square[cut.global_batch_size]),
        "small_batch_size": [cut.micro_batch_size if here else None for here in sampled],
        "small_gradient_square": [
            x if here else None for x, here in zip(small.tolist(), sampled, strict=True)
        ],
    }


def _write_launch(
    folder: RunFolder, devices: int, device_type: str, hardware: str, concurrent_runs: int
) -> None:
    reason = None
    if devices > CORES:
        reason = f"oversubscribed: {devices} ranks on {CORES} cores"
    elif concurrent_runs > 1:
        reason = f"{concurrent_runs} runs at the same time"
    content = {
        "attempt": 0,
        "world_size": devices,
        "device_type": device_type,
        "device_model": hardware,
        "devices": list(range(devices)),
        "threads_per_rank": 1,
        "concurrent_runs": concurrent_runs,
        "oversubscribed": devices > CORES,
        "timing_valid": reason is None,
        "timing_invalid_reason": reason,
        "rendezvous": "rendezvous",
    }
    write_json(folder.launch, content)


def _write_environment(folder: RunFolder) -> None:
    content = {
        "format_version": FORMAT_VERSION,
        "batchscape": "0.1.0",
        "python": "3.11.2",
        "packages": {"torch": "2.9.0"},
        "git": {"revision": "0" * 40, "dirty": False},
        "cpu": {"name": "Example CPU", "usable_cores": CORES},
        "cuda": {"driver": None, "devices": []},
    }
    write_json(folder.environment, content)


def _write_ranks(
    folder: RunFolder, cut: BatchGeometry, rng: np.random.Generator, **columns: Any
) -> None:
    """Write a row a rank; further columns have one value for all of them."""
    model = 0.005
    activations = 0.0021 * cut.micro_batch_size
    gradients = model + 0.001 * (cut.gradient_accumulation_steps > 1)
    ranks = np.arange(cut.data_parallel_size)
    first = model + gradients + activations
    steady = 3 * model + gradients + activations
    uss = 0.35 + steady + 0.002 * rng.random(len(ranks))
    _append(
        folder.lines("ranks"),
        rank=ranks,
        attempt=0 * ranks,
        device=["cpu"] * len(ranks),
        memory_method=["allocator"] * len(ranks),
        allocated_after_model_gib=model + 0.0 * ranks,
        peak_allocated_first_backward_gib=first + 0.0 * ranks,
        peak_allocated_first_optimizer_step_gib=steady - 0.5 * activations + 0.0 * ranks,
        peak_allocated_steady_gib=steady + 0.0 * ranks,
        peak_allocated_gib=steady + 0.0 * ranks,
        uss_gib=uss,
        peak_rss_gib=uss + 0.1,
        startup_s=0.3 + 0.0 * ranks,
        **{name: [value] * len(ranks) for name, value in columns.items()},
    )


def _append(path: Path, **columns: Any) -> None:
    lists = {
        name: column.tolist() if isinstance(column, np.ndarray) else column
        for name, column in columns.items()
    }
    lines = JsonLines(path)
    lines.append(dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True))
    lines.close()


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


@pytest.fixture(scope="session")
def kept_runs() -> dict[str, Path]:
    """Runs that a test of this session has written, by what was asked for."""
    return {}


@pytest.fixture
def build(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kept_runs: dict[str, Path]
) -> Callable[..., SweepBuilder]:
    """Return a maker of sweep folders, by name of the folder."""
    kept_in = tmp_path_factory.getbasetemp() / "kept-runs"

    def make(folder: str = "sweep", name: str = "fixed_global_batch") -> SweepBuilder:
        return SweepBuilder(tmp_path / folder, name, kept_runs, kept_in)

    return make
