"""Every setting is in exactly the names that its type says, tried by changing it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from batchscape.config import (
    Accelerate,
    AdamW,
    Batch,
    Budget,
    Checkpoint,
    Cluster,
    Command,
    Constant,
    Cosine,
    CustomModel,
    Ddp,
    DeepSpeed,
    Device,
    Evaluation,
    ExternalModel,
    Fabric,
    Fsdp,
    Gpt,
    Llama,
    Loader,
    Local,
    Measure,
    Mlp,
    Muon,
    NoSearch,
    NoTracker,
    RampStage,
    RunConfig,
    Sampler,
    Scaling,
    Sgd,
    Slurm,
    Transformers,
    WandbTracker,
    WarmupStableDecay,
)
from batchscape.config.settings import settings_of
from batchscape.config.types import Affects
from batchscape.models.source import model_source_hash
from batchscape.plan.identity import content_hash
from batchscape.plan.machine import CudaDevice, Machine
from batchscape.plan.resolve import resolve
from batchscape.plan.stages import solve_geometries
from batchscape.record.spec import DataIdentity

Settings = dict[str, Any]

# Its device has no bfloat16 of its own, so that the precision is one on both devices.
MACHINE = Machine(4, "a CPU", (CudaDevice(0, "a GPU", (7, 5), "GPU-0"),))

BASE: Settings = {
    "batch": {"global_batch_size": 32, "data_parallel_size": 2, "micro_batch_size": 8},
    "model": {"name": "gpt", "n_layers": 2, "n_heads": 4, "d_model": 128},
    "data": {"name": "stdlib"},
    "optimizer": {"name": "adamw", "learning_rate": 0.001},
    "schedule": {"name": "constant"},
    "scaling": {},
    "budget": {"samples": 3840},
    "evaluation": {"every_samples": 640},
    "engine": {"name": "ddp"},
    "loader": {},
    "device": {},
    "cluster": {},
    "checkpoint": {},
    "measure": {},
    "launcher": {"name": "local", "device": "cpu"},
    "tracker": {"name": "none"},
    "search": {"name": "none"},
}
PRODUCTS = ("float64", "float32", "tf32", "float16", "bfloat16")
ADAMW = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-6, "weight_decay": 0.2}
ENGINE = {
    "precision": "bfloat16",
    "float32_matmul": "high",
    "compile": True,
    "activation_checkpointing": True,
}
RATE = {"learning_rate": 0.002, "gradient_clip_norm": 0.5}

CHANGES: dict[type, tuple[str, Settings, dict[str, Any]]] = {
    Batch: (
        "batch",
        {},
        {
            "nodes": 2,
            "data_parallel_size": 1,
            "micro_batch_size": 4,
            "gradient_accumulation_steps": {
                "gradient_accumulation_steps": 4,
                "micro_batch_size": None,
            },
            "global_batch_size": 64,
            "global_batch_tokens": {"global_batch_size": None, "global_batch_tokens": 4096},
            "ramp": [{"samples": 640, "global_batch_size": 16}],
        },
    ),
    RampStage: (
        "batch",
        {"ramp": [{"samples": 640, "global_batch_size": 16}]},
        {
            "samples": {"ramp": [{"samples": 1280, "global_batch_size": 16}]},
            "global_batch_size": {"ramp": [{"samples": 640, "global_batch_size": 64}]},
        },
    ),
    Gpt: (
        "model",
        {"vocabulary_size": 299},
        {
            "n_layers": 3,
            "n_heads": 2,
            "d_model": 64,
            "vocabulary_size": 300,
            "loss_chunk": 1024,
            "dropout": 0.1,
        },
    ),
    Llama: (
        "model",
        {"name": "llama", "n_kv_heads": 2, "d_ff": 256, "vocabulary_size": 299},
        {
            "n_layers": 3,
            "n_heads": 8,
            "n_kv_heads": 4,
            "d_model": 64,
            "d_ff": 128,
            "rope_base": 500.0,
            "vocabulary_size": 300,
            "loss_chunk": 1024,
        },
    ),
    Mlp: ("model", {"name": "mlp", "hidden_sizes": [8]}, {"hidden_sizes": [9], "dropout": 0.1}),
    Transformers: (
        "model",
        {"name": "transformers", "path": "one"},
        {
            "path": "two",
            "pretrained": True,
            "settings": {"settings": {"n_layer": 3}},
        },
    ),
    CustomModel: (
        "model",
        {"name": "custom", "_target_": "a_module_of_mine.build"},
        {
            "target": {"_target_": "another_module_of_mine.build"},
            "arguments": {"arguments": {"width": 3}},
        },
    ),
    AdamW: ("optimizer", {}, {**ADAMW, **RATE}),
    Sgd: (
        "optimizer",
        {"name": "sgd"},
        {"momentum": 0.5, "nesterov": True, "weight_decay": 0.2, **RATE},
    ),
    Muon: (
        "optimizer",
        {"name": "muon"},
        {
            "momentum": 0.5,
            "newton_schulz_steps": 6,
            "adamw_learning_rate": 0.1,
            **ADAMW,
            **RATE,
        },
    ),
    Scaling: (
        "scaling",
        {"reference_global_batch_size": 16, "learning_rate": "sqrt"},
        {
            "reference_global_batch_size": 8,
            "learning_rate": "linear",
            "betas": "half_life",
            "weight_decay": "timescale",
        },
    ),
    Constant: ("schedule", {}, {"warmup_samples": 32}),
    Cosine: (
        "schedule",
        {"name": "cosine"},
        {"warmup_samples": 32, "decay_samples": 640, "final_fraction": 0.2},
    ),
    WarmupStableDecay: (
        "schedule",
        {"name": "wsd", "decay_samples": 640},
        {"warmup_samples": 32, "decay_samples": 320, "shape": "sqrt", "final_fraction": 0.2},
    ),
    Budget: (
        "budget",
        {},
        {
            "samples": 7680,
            "tokens": {"samples": None, "tokens": 491520},
            "optimizer_steps": {"samples": None, "optimizer_steps": 240},
            "target_loss": 2.0,
        },
    ),
    Evaluation: (
        "evaluation",
        {},
        {"every_samples": 320, "samples": 64, "batch_size": 32, "ema_half_life_tokens": 1e5},
    ),
    Ddp: (
        "engine",
        {},
        {
            "precision": "float64",
            "float32_matmul": "high",
            "compile": True,
            "activation_checkpointing": True,
        },
    ),
    Fsdp: (
        "engine",
        {"name": "fsdp"},
        {**ENGINE, "reshard_after_forward": False},
    ),
    Accelerate: ("engine", {"name": "accelerate"}, ENGINE),
    DeepSpeed: (
        "engine",
        {"name": "deepspeed"},
        {**{name: value for name, value in ENGINE.items() if name != "compile"}, "zero_stage": 3},
    ),
    Fabric: ("engine", {"name": "fabric"}, ENGINE),
    Loader: ("loader", {}, {"workers": 1}),
    Checkpoint: ("checkpoint", {}, {"every_s": 1.0}),
    Device: ("device", {}, {"memory_limit_gib": 0.5}),
    Cluster: (
        "cluster",
        {
            "device": "mine",
            "compute_capability": 9.0,
            "memory_gib": 80.0,
            "devices_per_node": 8,
            "nodes": 1,
        },
        {
            "device": "another",
            "known_as": "its name",
            "compute_capability": 7.5,
            "memory_gib": 40.0,
            "tflops": {"tflops": dict.fromkeys(PRODUCTS, 3.0)},
            **dict.fromkeys(("memory_gb_per_s", "link_gb_per_s", "network_gb_per_s"), 3.0),
            "devices_per_node": 4,
            "nodes": 2,
        },
    ),
    Measure: (
        "measure",
        {},
        {
            "warmup_optimizer_steps": 1,
            "memory": False,
            "noise_scale_every": 7,
            "equivalence_margin": 0.1,
            "equivalence_margin_steps": 0.3,
        },
    ),
    Local: (
        "launcher",
        {},
        {
            "device": "cuda",
            "concurrent_runs": 3,
            "oversubscribe": 5,
            "timeout_s": 60.0,
            "hang_s": None,
            "retries": 2,
            "retry": ["oom"],
            "max_failures": 2,
            "skip_unfit": False,
        },
    ),
    Slurm: (
        "launcher",
        {"name": "slurm", "device": "cpu"},
        {
            "device": "auto",
            "concurrent_runs": 3,
            "oversubscribe": 5,
            "timeout_s": 60.0,
            "hang_s": None,
            "retries": 2,
            "retry": ["oom"],
            "max_failures": 2,
            "skip_unfit": False,
            "jobs": 4,
            "timeout_min": 30,
            "signal_delay_s": 30,
            "max_num_timeout": 3,
            "sbatch": {"sbatch": {"exclusive": True}},
            "setup": ["module load cuda"],
            "python": "apptainer exec image.sif python",
        },
    ),
    WandbTracker: (
        "tracker",
        {"name": "wandb"},
        {"mode": "offline", "project": "mine", "entity": "me", "tags": ["a"]},
    ),
    NoTracker: ("tracker", {}, {}),
    NoSearch: ("search", {}, {}),
    Sampler: (
        "search",
        {"name": "gp"},
        {
            "objective": ["peak_allocated_gib"],
            "trials": 3,
            "seeds": 2,
            "over": ["model"],
            "pruner": "median",
            "grid_points": 3,
            "grid_seeds": 2,
        },
    ),
    RunConfig: (
        "",
        {},
        {
            "seed": 1,
            "init_seed": 1,
            "data_seed": 1,
            "timing_repeat": 1,
            "sweep_name": "mine",
            "sweep_dir": "some/where",
        },
    ),
}
"""A dataclass: its group, settings that choose it, and another value (or settings) a field."""

GROUPS = {name for name in get_type_hints(RunConfig) if name in BASE}


def owners(owner: type = RunConfig) -> Iterator[type]:
    """Yield every dataclass that settings are made of; what data hold is named by their content.

    Those of commands are tried in `tests/programs/test_scopes.py`.
    """
    yield owner
    for name, hint in get_type_hints(owner).items():
        for member in (hint, *get_args(hint)):
            if member in {Command, ExternalModel} or name == "data":
                continue
            if isinstance(member, type) and is_dataclass(member):
                yield from owners(member)


def names_in(owner: type) -> list[str]:
    return [
        field.name
        for field in fields(owner)
        if field.name not in {"name", *(GROUPS if owner is RunConfig else ())}
        # It has no other value.
        and (owner, field.name) != (DeepSpeed, "compile")
    ]


def merged(group: str, chosen: Settings, more: Settings) -> RunConfig:
    mapping: Settings = json.loads(json.dumps(BASE))
    target = mapping[group] if group else mapping
    if "name" in chosen and chosen["name"] in {"transformers", "custom", "mlp"}:
        target.clear()
    target |= chosen | more
    if mapping["model"]["name"] == "mlp":
        mapping["data"] = {"name": "digits"}
    return RunConfig.from_mapping(mapping)


def names(config: RunConfig) -> tuple[str, str]:
    data = DataIdentity(
        content_hash(config.to_mapping()["data"], 16), "nowhere", 9999, 999, 256, "next_token"
    )
    spec = resolve(
        config,
        solve_geometries(config),
        data,
        source_hash=model_source_hash(config),
        machine=MACHINE,
        sweep_name="sweep",
    )
    return spec.trajectory_id, spec.run_id


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make two model folders, and two modules of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "{name}"}}')
        (tmp_path / name / "model.safetensors").write_text(name)
    (tmp_path / "a_module_of_mine.py").write_text("build = 1")
    (tmp_path / "another_module_of_mine.py").write_text("build = 2")


CASES = [(owner, name) for owner in dict.fromkeys(owners()) for name in names_in(owner)]


def test_every_setting_is_tried() -> None:
    assert set(CHANGES) == set(owners())
    for owner, (_, _, changes) in CHANGES.items():
        assert set(changes) == set(names_in(owner)), owner


@pytest.mark.parametrize(
    ("owner", "name"), CASES, ids=[f"{owner.__name__}.{name}" for owner, name in CASES]
)
def test_a_setting_is_in_the_names_that_its_type_says(owner: Any, name: str) -> None:
    said = {setting.key: setting.affects for setting in settings_of(owner)}
    affects = said[owner.__pydantic_fields__[name].alias or name]
    group, chosen, changes = CHANGES[owner]
    value = changes[name]
    before = names(merged(group, chosen, {}))
    after = names(merged(group, chosen, value if isinstance(value, dict) else {name: value}))
    changed = [one != other for one, other in zip(before, after, strict=True)]
    assert changed == [Affects.LOSS in affects, affects != Affects.NOTHING]


@pytest.mark.parametrize(
    ("owner", "name", "trajectory_id", "run_id"),
    [
        (Gpt, "", "d35c549fc97678b7", "b32-d2-m8-a2-s0-3324e5d5"),
        (Llama, "", "194b67b85f6de218", "b32-d2-m8-a2-s0-ea1a269f"),
        (Mlp, "", "a0ce690eb5ee5554", "b32-d2-m8-a2-s0-f3b24801"),
        (Sgd, "", "d38a75b14cfc5a53", "b32-d2-m8-a2-s0-c657776d"),
        (Muon, "", "f737c7819a918279", "b32-d2-m8-a2-s0-c9604c40"),
        (Fsdp, "", "363b94e30d17e3cc", "b32-d2-m8-a2-s0-18f4a3c4"),
        (DeepSpeed, "", "070d6d91acc45968", "b32-d2-m8-a2-s0-3c754db1"),
        (Cosine, "", "55ece4406e7fa6c0", "b32-d2-m8-a2-s0-3cb2e54c"),
        (Evaluation, "ema_half_life_tokens", "50c72b72fc41809b", "b32-d2-m8-a2-s0-ba3f883d"),
        (Budget, "target_loss", "87125c51cc699fd6", "b32-d2-m8-a2-s0-a590ba75"),
        (Batch, "ramp", "38946aca8a1386db", "b32-d2-m8-a2-s0-7e2c9a84"),
        (Loader, "workers", "5959138657b6a2eb", "b32-d2-m8-a2-s0-22f33e85"),
        (Device, "memory_limit_gib", "5959138657b6a2eb", "b32-d2-m8-a2-s0-b0cb7384"),
        (Measure, "memory", "5959138657b6a2eb", "b32-d2-m8-a2-s0-8f0ba644"),
        (Measure, "noise_scale_every", "5959138657b6a2eb", "b32-d2-m8-a2-s0-ae3129f4"),
        (Ddp, "activation_checkpointing", "5959138657b6a2eb", "b32-d2-m8-a2-s0-16f5373a"),
        (Local, "device", "5959138657b6a2eb", "b32-d2-m8-a2-s0-033cc4f2"),
        (RunConfig, "timing_repeat", "5959138657b6a2eb", "b32-d2-m8-a2-s0-7b2122dd"),
        (RunConfig, "data_seed", "83325ca7670af270", "b32-d2-m8-a2-s0.1-fe175867"),
    ],
)
def test_names_stay_what_they_are(owner: Any, name: str, trajectory_id: str, run_id: str) -> None:
    """A change here orphans runs that are done: it must be meant, and said in the changelog."""
    group, chosen, changes = CHANGES[owner]
    value = changes[name] if name else {}
    config = merged(group, chosen, value if isinstance(value, dict) else {name: value})
    assert names(config) == (trajectory_id, run_id)


def test_a_folder_counts_by_its_content(tmp_path: Path) -> None:
    def of(path: str) -> tuple[str, str]:
        return names(merged("model", {"name": "transformers"}, {"path": path}))

    (tmp_path / "two" / "config.json").write_text('{"model_type": "one"}')
    assert of("two") == of("one")
    (tmp_path / "one" / "config.json").write_text('{"model_type": "other"}')
    assert of("two") != of("one")
