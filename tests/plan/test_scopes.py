"""Every setting is in exactly the names that its type or its group says, tried by changing it."""

import json
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest

from batchscape.config import (
    Accelerate,
    Affects,
    Batch,
    Budget,
    Checkpoint,
    Cluster,
    Command,
    Cosine,
    CustomModel,
    DataSettings,
    Ddp,
    DeepSpeed,
    Device,
    Evaluation,
    ExternalData,
    Fabric,
    Fsdp,
    Gpt,
    JsonlMetrics,
    Llama,
    Loader,
    Local,
    Measure,
    Mlp,
    Muon,
    RegexMetrics,
    RunConfig,
    Sampler,
    Scaling,
    Sgd,
    Slurm,
    TrainerStateMetrics,
    Transformers,
    WandbTracker,
    WarmupStableDecay,
)
from batchscape.config.settings import SETTINGS
from batchscape.config.types import members_of
from batchscape.cuda_devices import CudaDevice
from batchscape.data.corpus import prepare
from batchscape.errors import BatchscapeError
from batchscape.plan.build import make_plan
from batchscape.plan.expand import Cell, SweepCells
from batchscape.plan.identity import content_hash
from batchscape.plan.machine import Machine
from batchscape.record.spec import DataIdentity

# Its devices have no bfloat16 of their own, so that the precision is one on both kinds.
GPUS = tuple(CudaDevice(number, "a GPU", (7, 5), f"GPU-{number}") for number in range(4))
MACHINE = Machine(4, "a CPU", GPUS, nodes=2)

BASE = {
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
PROGRAM = {
    "model": {"name": "external"},
    "data": {"name": "external"},
    "engine": {
        "name": "command",
        "argv": ["{python}", "{x}"],
        "values": {"x": 1},
        "metrics": {"kind": "recorder"},
    },
}
"""What stands in their place where a program trains."""
LOG = {"loss_of": "other"}
PATTERN = r"(?P<optimizer_step>\d+) (?P<loss>\S+)"


def program_with(metrics):
    return PROGRAM | {"engine": PROGRAM["engine"] | {"metrics": metrics}}


BESIDE = {
    Mlp: {"model": {"name": "mlp", "hidden_sizes": [8]}, "data": {"name": "digits"}},
    Llama: {"model": BASE["model"] | {"name": "llama", "n_kv_heads": 2, "d_ff": 256}},
    Transformers: {"model": {"name": "transformers", "path": "one"}},
    CustomModel: {"model": {"name": "custom", "_target_": "a_module_of_mine.build"}},
    Sgd: {"optimizer": {"name": "sgd", "learning_rate": 0.001}},
    Muon: {"optimizer": {"name": "muon", "learning_rate": 0.001}},
    Scaling: {"scaling": {"reference_global_batch_size": 16, "learning_rate": "sqrt"}},
    Cosine: {"schedule": {"name": "cosine"}},
    WarmupStableDecay: {"schedule": {"name": "wsd", "decay_samples": 640}},
    Fsdp: {"engine": {"name": "fsdp"}},
    Accelerate: {"engine": {"name": "accelerate"}},
    DeepSpeed: {"engine": {"name": "deepspeed"}},
    Fabric: {"engine": {"name": "fabric"}},
    Cluster: {
        "cluster": {
            "device": "mine",
            "compute_capability": 9.0,
            "memory_gib": 80.0,
            "devices_per_node": 8,
            "nodes": 1,
        },
    },
    Slurm: {"launcher": {"name": "slurm", "device": "cpu"}},
    WandbTracker: {"tracker": {"name": "wandb"}},
    Sampler: {"search": {"name": "gp"}},
    Command: PROGRAM,
    ExternalData: PROGRAM,
    TrainerStateMetrics: program_with({"kind": "trainer_state"}),
    JsonlMetrics: program_with(
        {"kind": "jsonl", "columns": {"optimizer_step": "step", "loss": "loss"}, **LOG}
    ),
    RegexMetrics: program_with({"kind": "regex", "pattern": PATTERN, **LOG}),
}
"""Groups in which a dataclass is chosen that is not in `BASE`."""
VALUES = {
    (Batch, "gradient_accumulation_steps"): {
        "gradient_accumulation_steps": 4,
        "micro_batch_size": None,
    },
    (Batch, "global_batch_tokens"): {"global_batch_size": None, "global_batch_tokens": 4096},
    (Batch, "ramp"): {"ramp": [{"samples": 640, "global_batch_size": 16}]},
    (Budget, "tokens"): {"samples": None, "tokens": 491520},
    (Budget, "optimizer_steps"): {"samples": None, "optimizer_steps": 240},
    (Checkpoint, "keep_at_samples"): {"keep_at_samples": [640]},
    (Command, "argv"): {"argv": ["{python}", "{x}", "more"]},
    (Command, "values"): {"values": {"x": 2}},
    (JsonlMetrics, "columns"): {"columns": {"optimizer_step": "step", "loss": "nll"}},
    (JsonlMetrics, "units"): {
        "columns": {"optimizer_step": "step", "loss": "loss", "step_time_s": "t"},
        "units": {"step_time_s": "s"},
    },
    (RegexMetrics, "pattern"): {"pattern": f"x{PATTERN}"},
    (RegexMetrics, "evaluation_pattern"): {
        "evaluation_pattern": r"(?P<optimizer_step>\d+) (?P<eval_loss>\S+)",
    },
    (RegexMetrics, "geometry_pattern"): {"geometry_pattern": r"(?P<world_size>\d+)"},
    (RegexMetrics, "units"): {
        "pattern": rf"{PATTERN} (?P<step_time_s>\S+)",
        "units": {"step_time_s": "s"},
    },
}
"""Other values of a setting that only its meaning tells, with what has to change beside it."""
ONE_VALUE = {(DeepSpeed, "compile")}
"""What is refused but for its default."""
# What the data hold names them, not their settings; `name` and `kind` choose a dataclass.
TRIED = [
    setting
    for setting in SETTINGS
    if setting.owner not in members_of(DataSettings) or setting.owner is ExternalData
    if setting.path[-1] not in {"name", "kind"}
    if (setting.owner, setting.path[-1]) not in ONE_VALUE
]


SCALARS = {
    bool: (True, False),
    int: (2, 1, 3, 4, 64, 320),
    float: (0.25, 60.0),
    str: ("two", "another_module_of_mine.build"),
    NoneType: (None,),
}


def values_of(hint):
    """Yield values of a type, of which a setting has at least one other than its default."""
    inner = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            yield from values_of(inner[0])
        case origin if origin in {Union, UnionType}:
            for member in inner:
                yield from values_of(member)
        case origin if origin is Literal:
            yield from reversed(inner)  # those at the end are the least like `auto`
        case origin if origin is list:
            yield from ([value] for value in values_of(inner[0]))
        case origin if origin is dict:
            yield from ({name: value} for name in values_of(inner[0]) for value in (3.0, "b"))
        case _:
            yield from SCALARS.get(hint, ())


def settings_with(beside, path=(), more=None):
    """Return the base with other groups, and in the group at the end of a path other settings."""
    mapping = json.loads(json.dumps(BASE | beside))
    group = mapping
    for name in path:
        group = group[name]
    group |= more or {}
    return mapping


def names(mapping):
    """Return a configuration, its trajectory_id and its run_id."""

    def identity(data):
        if isinstance(data, ExternalData):
            return prepare(data)
        hashed = content_hash(RunConfig.from_mapping(mapping).to_mapping()["data"], 16)
        return DataIdentity(hashed, "nowhere", 9999, 999, 256, "next_token")

    grid = SweepCells([Cell(mapping, {})], frozenset(), {}, None)
    (spec,) = make_plan(grid, MACHINE, identity).specs
    return spec.config, spec.trajectory_id, spec.run_id


@pytest.fixture(autouse=True)
def _folders(tmp_path, monkeypatch):
    """Make folders of two models, modules of one's own, and a folder that is one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "{name}"}}')
        (tmp_path / name / "model.safetensors").write_text(name)
    (tmp_path / "a_module_of_mine.py").write_text("build = 1")
    (tmp_path / "another_module_of_mine.py").write_text("build = 2")


@pytest.mark.parametrize(
    "setting", TRIED, ids=[f"{setting.owner.__name__}.{setting.path[-1]}" for setting in TRIED]
)
def test_a_setting_is_in_the_names_that_it_says(setting):
    beside = BESIDE.get(setting.owner, {})
    *group, field = setting.path
    before, *one = names(settings_with(beside))
    name = setting.key.rpartition(".")[2]
    values = VALUES.get((setting.owner, field))
    tried = [values] if values else [{name: value} for value in values_of(setting.hint)]
    for more in tried:
        try:
            config, *other = names(settings_with(beside, tuple(group), more))
        except (BatchscapeError, ValueError):
            continue
        if config != before:
            break
    else:
        pytest.fail("no other value fits: give one in VALUES")
    changed = [before != after for before, after in zip(one, other, strict=True)]
    assert changed == [Affects.LOSS in setting.affects, setting.affects != Affects.NOTHING]


@pytest.mark.parametrize(
    ("owner", "group", "more", "trajectory_id", "run_id"),
    [
        (Gpt, "model", {"vocabulary_size": 299}, "d35c549fc97678b7", "b32-d2-m8-a2-s0-3324e5d5"),
        (Llama, "model", {"vocabulary_size": 299}, "194b67b85f6de218", "b32-d2-m8-a2-s0-ea1a269f"),
        (Mlp, "model", {}, "a0ce690eb5ee5554", "b32-d2-m8-a2-s0-f3b24801"),
        (Sgd, "optimizer", {}, "d38a75b14cfc5a53", "b32-d2-m8-a2-s0-c657776d"),
        (Muon, "optimizer", {}, "f737c7819a918279", "b32-d2-m8-a2-s0-c9604c40"),
        (Fsdp, "engine", {}, "363b94e30d17e3cc", "b32-d2-m8-a2-s0-18f4a3c4"),
        (DeepSpeed, "engine", {}, "070d6d91acc45968", "b32-d2-m8-a2-s0-3c754db1"),
        (Cosine, "schedule", {}, "55ece4406e7fa6c0", "b32-d2-m8-a2-s0-3cb2e54c"),
        (
            Evaluation,
            "evaluation",
            {"ema_half_life_tokens": 1e5},
            "50c72b72fc41809b",
            "b32-d2-m8-a2-s0-ba3f883d",
        ),
        (Budget, "budget", {"target_loss": 2.0}, "87125c51cc699fd6", "b32-d2-m8-a2-s0-a590ba75"),
        (
            Batch,
            "batch",
            {"ramp": [{"samples": 640, "global_batch_size": 16}]},
            "38946aca8a1386db",
            "b32-d2-m8-a2-s0-7e2c9a84",
        ),
        (Loader, "loader", {"workers": 1}, "5959138657b6a2eb", "b32-d2-m8-a2-s0-22f33e85"),
        (
            Device,
            "device",
            {"memory_limit_gib": 0.5},
            "5959138657b6a2eb",
            "b32-d2-m8-a2-s0-b0cb7384",
        ),
        (Measure, "measure", {"memory": False}, "5959138657b6a2eb", "b32-d2-m8-a2-s0-8f0ba644"),
        (
            Measure,
            "measure",
            {"noise_scale_every": 7},
            "5959138657b6a2eb",
            "b32-d2-m8-a2-s0-ae3129f4",
        ),
        (
            Ddp,
            "engine",
            {"activation_checkpointing": True},
            "5959138657b6a2eb",
            "b32-d2-m8-a2-s0-16f5373a",
        ),
        (Local, "launcher", {"device": "cuda"}, "5959138657b6a2eb", "b32-d2-m8-a2-s0-033cc4f2"),
        (RunConfig, "", {"timing_repeat": 1}, "5959138657b6a2eb", "b32-d2-m8-a2-s0-7b2122dd"),
        (RunConfig, "", {"data_seed": 1}, "83325ca7670af270", "b32-d2-m8-a2-s0.1-fe175867"),
    ],
)
def test_names_stay_what_they_are(owner, group, more, trajectory_id, run_id):
    """A change here orphans runs that are done: it must be meant, and said in the changelog."""
    mapping = settings_with(BESIDE.get(owner, {}), (group,) if group else (), more)
    assert names(mapping)[1:] == (trajectory_id, run_id)


def test_a_folder_counts_by_its_content(tmp_path):
    def of(path):
        _, *other_names = names(settings_with({"model": {"name": "transformers", "path": path}}))
        return other_names

    (tmp_path / "two" / "config.json").write_text('{"model_type": "one"}')
    assert of("two") == of("one")
    (tmp_path / "one" / "config.json").write_text('{"model_type": "other"}')
    assert of("two") != of("one")
