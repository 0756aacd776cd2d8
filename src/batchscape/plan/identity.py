"""Names of runs and sweeps, by their content and never by the clock."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from batchscape.config import (
    Affects,
    Command,
    LanguageModel,
    RunConfig,
    affects_of,
    that_affect,
)
from batchscape.errors import ConfigError
from batchscape.models.vocabulary import vocabulary_size
from batchscape.record.placeholders import (
    CUT_PLACEHOLDERS,
    placeholder_values,
    used_placeholders,
)
from batchscape.record.spec import DataIdentity, RunSpec, Stage

_NOT_IN_SWEEP_NAME = {"timing_repeat", "launcher", "launcher.device"}
"""Settings that do not name the sweep folder: repeats and other devices belong beside what they
repeat."""


def content_hash(content: Any, digits: int) -> str:  # noqa: ANN401  (anything that JSON carries)
    """Return the first hexadecimal digits of the SHA-256 of the canonical JSON.

    Keys are sorted and nothing but content is written, so that neither the order of keys nor
    white space matters.
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def trajectory_id(
    config: RunConfig,
    data: DataIdentity,
    stages: Sequence[Stage],
    *,
    precision: str,
    source_hash: str | None,
) -> str:
    """Name all that determines a loss curve; how the global batch is cut is no part of it.

    Resolved values are hashed in place of the settings that they follow from, so that a training
    has one name however it was asked for: the optimizer's settings that a scaling rule gave, the
    stages of a ramp.
    """
    if isinstance(config.engine, Command):
        values = placeholder_values(config, stages)
        return _command_trajectory_id(config.engine, values, data, stages, source_hash)
    settings = that_affect(config, Affects.LOSS)
    data_identity = {**asdict(data), "folder": None}
    model, schedule, engine = settings["model"], settings["schedule"], settings["engine"]
    if isinstance(config.model, LanguageModel):
        model = {**model, "vocabulary_size": vocabulary_size(config.model, data)}
    if "decay_samples" in schedule and schedule["decay_samples"] is None:
        schedule = {**schedule, "decay_samples": sum(stage.samples for stage in stages)}
    content = {
        "data": {name: value for name, value in data_identity.items() if value is not None},
        "model": {name: value for name, value in model.items() if name != "path"},
        "source": source_hash,
        "stages": [
            [stage.samples, stage.geometry.global_batch_size, asdict(stage.optimizer)]
            for stage in stages
        ],
        "schedule": schedule,
        "evaluation": settings["evaluation"],
        **engine,
        "engine": engine["name"],
        "precision": precision,
        "target_loss": config.budget.target_loss,
        "init_seed": config.resolved_init_seed,
        "data_seed": config.resolved_data_seed,
    }
    del content["name"]  # of the engine, under which it stands
    return content_hash(content, 16)


def _command_trajectory_id(
    command: Command,
    values: Mapping[str, Any],
    data: DataIdentity,
    stages: Sequence[Stage],
    source_hash: str | None,
) -> str:
    """Name the training of a program by its content and its arguments, those of the cut excluded.

    Whether its cuts train alike is up to the program: it is measured wherever they are compared,
    and no curve stands for that of another cut.
    """
    passed = set(used_placeholders(command)) - CUT_PLACEHOLDERS
    content = {
        "data": data.manifest_hash,
        "engine": command.name,
        "argv": command.argv,
        "environment": command.environment,
        "values": {name: value for name, value in values.items() if name in passed},
        "precision": command.precision,
        "source": source_hash,
        "stages": [[stage.samples, stage.geometry.global_batch_size] for stage in stages],
    }
    # A command such as `python -m train` is another program in another folder.
    if command.cwd is not None:
        content["cwd"] = command.cwd
    return content_hash(content, 16)


def run_id(config: RunConfig, trajectory: str, stages: Sequence[Stage], device_type: str) -> str:
    """Name a run: a trajectory, on one layout of devices, measured once.

    `device.memory_limit_gib` and `metrics.eval_loss` enter the name only where they are set.
    """
    content: dict[str, Any] = {
        "trajectory_id": trajectory,
        "geometries": [astuple(stage.geometry) for stage in stages],
        "device_type": device_type,
    }
    # A setting that is not passed to a program changes nothing of its run.
    passed_only = isinstance(config.engine, Command)
    cost = Affects.COST | Affects.RECORD
    for group, values in that_affect(
        config, cost, without=Affects.LOSS, for_program=passed_only
    ).items():
        if group in {"loader", "timing_repeat"}:
            content[group] = values
        elif group not in {"batch", "launcher"}:  # the geometry and the type of the device
            content |= values
    content["measure_memory"] = content.pop("memory")
    if content["memory_limit_gib"] is None:
        del content["memory_limit_gib"]
    metrics = content.get("metrics", {})
    if metrics.get("eval_loss", "") is None:
        del metrics["eval_loss"]
    geometry = stages[-1].geometry
    return "-".join(
        (
            f"b{geometry.global_batch_size}",
            f"d{geometry.data_parallel_size}",
            f"m{geometry.micro_batch_size}",
            f"a{geometry.gradient_accumulation_steps}",
            f"s{_seeds(config)}",
            content_hash(content, 8),
        )
    )


def beginning_key(spec: RunSpec) -> str:
    """Name what runs that begin alike have in common, apart from stages and schedule."""
    config = spec.config
    settings = that_affect(config, Affects.ALL | Affects.RECORD)
    # Stages have what these come to.
    for group in ("batch", "optimizer", "scaling", "schedule", "seed", "launcher"):
        settings.pop(group, None)
    content = settings | {
        "budget": config.budget.target_loss,
        "data": {**asdict(spec.data), "folder": None},
        "source": spec.source_hash,
        "precision": spec.precision,
        "device_type": spec.device_type,
        "init_seed": config.resolved_init_seed,
        "data_seed": config.resolved_data_seed,
    }
    return content_hash(content, 16)


def rejected_id(config: RunConfig) -> str:
    """Name a cell that has no geometry, by what was asked for."""
    batch = config.batch
    factors = {
        "b": batch.global_batch_size,
        "d": batch.data_parallel_size,
        "m": batch.micro_batch_size,
        "a": batch.gradient_accumulation_steps,
        "s": _seeds(config),
    }
    settings = that_affect(config, Affects.ALL | Affects.RECORD)
    # Without a geometry nothing is measured, anywhere.
    del settings["measure"], settings["launcher"]
    if config.device.memory_limit_gib is None:
        del settings["device"]
    # What `seed` stands for, so that equal cells have equal names.
    del settings["seed"]
    settings["init_seed"] = config.resolved_init_seed
    settings["data_seed"] = config.resolved_data_seed
    parts = [f"{letter}{value}" for letter, value in factors.items() if value is not None]
    return "-".join((*parts, content_hash(settings, 8)))


def _seeds(config: RunConfig) -> str:
    init, data = config.resolved_init_seed, config.resolved_data_seed
    return f"{init}" if init == data else f"{init}.{data}"


def name_sweep(
    config: RunConfig,
    *,
    sweep_file: str | None,
    swept_keys: Iterable[str],
    fixed: Mapping[str, Any],
) -> tuple[str, Path]:
    """Return the name and the folder of a sweep.

    The name is that of the sweep file, else made of the swept settings, else `run`; settings that
    the command line fixes add a short hash. Values of swept settings do not count, so that added
    seeds or cells extend the same folder; nor do settings that decide nothing of a run, nor
    `timing_repeat` and `launcher.device`: what is measured again belongs beside what it repeats.
    """
    if config.sweep_name is not None:
        name = config.sweep_name
        if not re.fullmatch(r"\w[\w.,-]*", name):
            raise ConfigError(
                f"sweep_name={name!r}: a name has letters, digits and any of _ - . , only"
            )
    else:
        counted_keys = (key for key in swept_keys if key != "timing_repeat")
        name = sweep_file or "-".join(sorted({re.split(r"[./]", k)[-1] for k in counted_keys}))
        # Never `..`, and never hidden.
        name = re.sub(r"[^\w.-]+", "-", name).lstrip(".") or "run"
        plain_keys = {k: k.lstrip("+~").partition("@")[0].replace("/", ".") for k in fixed}
        counted = {
            key: fixed[key]
            for key, plain in plain_keys.items()
            if plain not in _NOT_IN_SWEEP_NAME and affects_of(plain)
        }
        if counted:
            name += f"-{content_hash(counted, 8)}"
    return name, Path(config.sweep_dir) if config.sweep_dir else Path("outputs") / name
