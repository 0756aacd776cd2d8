"""From one validated configuration to one run, or to the reason why it cannot be one."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from batchscape.config import (
    Command,
    Constant,
    Cosine,
    ExternalData,
    LanguageModel,
    RunConfig,
    Slurm,
)
from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry
from batchscape.plan.identity import run_id, trajectory_id
from batchscape.plan.machine import Machine
from batchscape.plan.stages import check_evaluations, make_stages
from batchscape.record.spec import DataIdentity, RunSpec
from batchscape.text import near_multiples

_NATIVE_BFLOAT16 = (8, 0)
"""Compute capability from which tensor cores take bfloat16. Source: CUDA C++ Programming Guide,
table "Feature Support per Compute Capability"."""

_REACH = 10
"""A common multiple of the global batches is in reach up to so many times the largest of them, or
the shortest of what was asked for."""
_SHOWN = 12
_UNCOUNTED = {
    "budget.samples": "budget=optimizer_steps, which needs none",
    "budget.tokens": "budget=optimizer_steps, which needs none",
    "evaluation.every_samples": "evaluation.every_samples=null (before and after the training)",
}
"""What to use where samples are not to be counted."""


def placement_problem(geometry: BatchGeometry, config: RunConfig, machine: Machine) -> str | None:
    """Say why a machine cannot hold a geometry; None where it can."""
    device_type = machine.device_type(config.launcher)
    if geometry.nodes > machine.nodes:
        return (
            f"batch.nodes may be at most the machine's {machine.nodes}; nodes={geometry.nodes}; a "
            "cluster of several can be declared and planned for: cluster=h100_80g cluster.nodes=2"
        )
    is_on_slurm = isinstance(config.launcher, Slurm)
    if is_on_slurm and geometry.nodes > 1 and isinstance(config.engine, Command):
        return (
            "launcher=slurm starts a program of engine=command on one node, whatever it starts "
            f"itself; nodes={geometry.nodes}; use batch.nodes=1"
        )
    per_node = machine.devices(device_type) // machine.nodes
    if machine.nodes > 1 and geometry.devices_per_node > per_node:
        nodes_needed = -(-geometry.data_parallel_size // per_node)
        return (
            f"devices_per_node may be at most the {per_node} of a node of this cluster; "
            f"devices_per_node={geometry.devices_per_node}; batch.nodes={nodes_needed} would take "
            f"more nodes, where {nodes_needed} divides "
            f"data_parallel_size={geometry.data_parallel_size}"
        )
    ranks = geometry.data_parallel_size
    devices = machine.devices(device_type)
    name = "CUDA devices" if device_type == "cuda" else "cores"
    each = config.launcher.ranks_per_device(device_type)
    if ranks <= devices * each:
        return None
    return (
        f"data_parallel_size may be at most {name} x ranks that share one = "
        f"{devices} x {each} = {devices * each}; data_parallel_size={ranks}; "
        f"launcher.oversubscribe={-(-ranks // devices)} would let ranks share {name}, so that "
        "no time of theirs is valid"
    )


def resolve(
    config: RunConfig,
    geometries: Sequence[BatchGeometry],
    data: DataIdentity,
    *,
    source_hash: str | None,
    machine: Machine,
    sweep_name: str,
) -> RunSpec:
    """Return the run of a configuration: device type, precision, stages and names."""
    device_type = machine.device_type(config.launcher)
    stages = make_stages(config, geometries)
    check_evaluations(config.evaluation.every_samples, stages)
    _check_schedule(config, sum(stage.samples for stage in stages))
    # The sizes of data that a program reads for itself are not known.
    is_known = not isinstance(config.data, ExternalData)
    if is_known and config.evaluation.samples > data.held_out_samples:
        raise ConfigError(
            f"evaluation.samples may be at most the held-out samples; given "
            f"{config.evaluation.samples}, held out: {data.held_out_samples}; use "
            f"evaluation.samples={data.held_out_samples}"
        )
    precision = _precision(config, device_type, machine)
    chunk = config.model.loss_chunk if isinstance(config.model, LanguageModel) else None
    if precision == "float16" and chunk:
        raise ConfigError(
            "model.loss_chunk computes gradients before engine.precision=float16 scales the loss, "
            "so that no scale keeps them from overflowing; given loss_chunk="
            f"{chunk}; take engine.precision=bfloat16, or model.loss_chunk=null"
        )
    trajectory = trajectory_id(config, data, stages, precision=precision, source_hash=source_hash)
    spec = RunSpec(
        run_id=run_id(config, trajectory, stages, device_type),
        trajectory_id=trajectory,
        sweep_name=sweep_name,
        stages=stages,
        device_type=device_type,
        precision=precision,
        evaluation_every_samples=config.evaluation.every_samples,
        data=data,
        config=config,
        source_hash=source_hash,
    )
    for samples in config.checkpoint.keep_at_samples:
        if samples <= spec.samples and spec.steps_of(samples) is None:
            common = math.lcm(*(stage.geometry.global_batch_size for stage in stages))
            raise ConfigError(
                f"checkpoint.keep_at_samples: {samples} samples end within an optimizer step; use "
                f"{near_multiples(samples, common)}"
            )
    return spec


def check_multiples(config: RunConfig, global_batches: Collection[int]) -> None:
    """Check that budget and evaluations fall on whole optimizer steps of every global batch.

    Then all runs of a sweep end, and are evaluated, at the same samples. Runs with a ramp change
    their global batch on the way; `stages` checks them one by one.
    """
    common = math.lcm(*global_batches)
    length = config.sequence_length or 1
    settings = [
        (name, value, unit)
        for name, value, unit in (
            ("budget.samples", config.budget.samples, 1),
            ("budget.tokens", config.budget.tokens, length),
            ("evaluation.every_samples", config.evaluation.every_samples, 1),
        )
        if value is not None
    ]
    shortest = min((value // unit for _, value, unit in settings), default=0)
    reach = _REACH * max(shortest, *global_batches, 1)
    problems = []
    for name, value, unit in settings:
        if value % (common * unit) == 0:
            continue
        tokens = f" x sequence_length {length}" if name == "budget.tokens" else ""
        sizes = sorted(global_batches)
        if common > reach:
            problems.append(
                f"{name} must be a multiple of every global batch{tokens}; given {value}, and the "
                f"global batches {_some(sizes)} have no common multiple up to {reach} samples; "
                f"use fewer of them, or {_UNCOUNTED[name]}"
            )
            continue
        rule = (
            f"the global batch {common}"
            if len(sizes) == 1
            else f"{common}, the least common multiple of the global batches {_some(sizes)}"
        )
        nearest = near_multiples(value, common * unit)
        problems.append(
            f"{name} must be a multiple of {rule}{tokens}; given {value}; use {nearest}"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _some(sizes: Sequence[int]) -> str:
    """List numbers; of many the first ones and the last."""
    texts = list(map(str, sizes))
    return ", ".join(texts if len(texts) <= _SHOWN else [*texts[: _SHOWN - 2], "...", texts[-1]])


def _check_schedule(config: RunConfig, samples: int) -> None:
    """Check that the parts of a schedule do not overlap."""
    schedule = config.schedule
    if isinstance(schedule, Constant):
        return
    if isinstance(schedule, Cosine):
        end = schedule.decay_samples or samples
        if schedule.warmup_samples >= end:
            raise ConfigError(
                f"schedule.warmup_samples must be below the end of the decay; given "
                f"warmup_samples={schedule.warmup_samples}, the decay ends at {end} samples; use "
                f"schedule.warmup_samples={end - 1} or less"
            )
    elif schedule.warmup_samples + schedule.decay_samples > samples:
        room = samples - schedule.warmup_samples
        use = f"decay_samples={room}" if room > 0 else f"warmup_samples={samples - 1}"
        raise ConfigError(
            f"schedule.warmup_samples and decay_samples must fit in the budget one after the "
            f"other: {schedule.warmup_samples} + {schedule.decay_samples} > {samples} samples; "
            f"use schedule.{use} or less"
        )


def _precision(config: RunConfig, device_type: str, machine: Machine) -> str:
    if config.engine.precision != "auto":
        return config.engine.precision
    native = device_type == "cuda" and all(
        device.compute_capability >= _NATIVE_BFLOAT16 for device in machine.cuda_devices
    )
    return "bfloat16" if native else "float32"
