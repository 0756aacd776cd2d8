"""From one validated configuration to one run, or to the reason why it cannot be one."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from batchscape.config import Cosine, RunConfig
from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry, solve
from batchscape.plan.identity import rejected_id, run_id, trajectory_id
from batchscape.plan.machine import Machine
from batchscape.record.spec import DataIdentity, RunSpec, Stage

__all__ = [
    "Rejection",
    "check_multiples",
    "placement_problem",
    "reject",
    "resolve",
    "solve_geometry",
]

_NATIVE_BFLOAT16 = (8, 0)
"""Compute capability from which tensor cores take bfloat16. Source: CUDA C++ Programming Guide,
table "Feature Support per Compute Capability"."""

_LIMIT = 2**63


@dataclass(frozen=True)
class Rejection:
    """A cell that is never launched."""

    run_id: str
    config: RunConfig
    geometry: BatchGeometry | None
    """The geometry that this machine cannot hold; None where there is none."""
    reason: str
    """The rule, the values, and what would work."""


def solve_geometry(config: RunConfig) -> BatchGeometry:
    """Return the geometry that the batch settings determine.

    Raises
    ------
    GeometryError
        If there is none.
    """
    batch = config.batch
    return solve(
        nodes=batch.nodes,
        devices_per_node=batch.devices_per_node,
        data_parallel_size=batch.data_parallel_size,
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        global_batch_size=batch.global_batch_size,
        global_batch_tokens=batch.global_batch_tokens,
        sequence_length=config.sequence_length if batch.global_batch_tokens else None,
    )


def placement_problem(geometry: BatchGeometry, config: RunConfig, machine: Machine) -> str | None:
    """Say why a machine cannot hold a geometry; None where it can."""
    if geometry.nodes > 1:
        return f"launcher=local runs on one machine; nodes={geometry.nodes}"
    ranks = geometry.data_parallel_size
    device_type = machine.device_type(config.launcher)
    devices = machine.devices(device_type)
    if device_type == "cuda":
        if ranks <= devices:
            return None
        return (
            f"a rank needs a CUDA device of its own; data_parallel_size={ranks}, "
            f"CUDA devices here: {devices}"
        )
    per_core = config.launcher.max_ranks_per_core
    if ranks <= devices * per_core:
        return None
    return (
        f"data_parallel_size may be at most cores x launcher.max_ranks_per_core = "
        f"{devices} x {per_core} = {devices * per_core}; data_parallel_size={ranks}"
    )


def reject(
    config: RunConfig,
    reason: str,
    *,
    geometry: BatchGeometry | None = None,
    run_id: str | None = None,
) -> Rejection:
    """Return a rejected cell.

    A cell that merely lacks devices has the name of the run that it would be, so that a larger
    machine goes on in the same folder.
    """
    return Rejection(run_id or rejected_id(config), config, geometry, reason)


def resolve(
    config: RunConfig,
    geometry: BatchGeometry,
    data: DataIdentity,
    machine: Machine,
    sweep_name: str,
) -> RunSpec:
    """Settle everything that is left to be decided.

    Parameters
    ----------
    config : RunConfig
    geometry : BatchGeometry
        As `solve_geometry` gave it.
    data : DataIdentity
        The prepared data.
    machine : Machine
        Decides device type and precision.
    sweep_name : str

    Returns
    -------
    RunSpec

    Raises
    ------
    ConfigError
        If budget, schedule or evaluation break a rule.
    """
    device_type = machine.device_type(config.launcher)
    global_batch = geometry.global_batch_size
    samples = _budget_samples(config, global_batch)
    if samples >= _LIMIT:
        msg = f"a budget must be below 2**63 samples, as positions are 64-bit; given {samples}"
        raise ConfigError(msg)
    _check_schedule(config, samples)
    if config.evaluation.samples > data.held_out_samples:
        msg = (
            f"evaluation.samples may be at most the held-out samples; given "
            f"{config.evaluation.samples}, held out: {data.held_out_samples}"
        )
        raise ConfigError(msg)
    precision = _precision(config, device_type, machine)
    trajectory = trajectory_id(
        config, data, global_batch_size=global_batch, samples=samples, precision=precision
    )
    return RunSpec(
        run_id=run_id(config, trajectory, geometry, device_type),
        trajectory_id=trajectory,
        sweep_name=sweep_name,
        stages=(Stage(samples, geometry, config.optimizer),),
        device_type=device_type,
        precision=precision,
        evaluation_every_samples=config.evaluation.every_samples,
        data=data,
        config=config,
    )


def check_multiples(config: RunConfig, global_batches: Collection[int]) -> None:
    """Check that budget and evaluations fall on whole optimizer steps of every global batch.

    Then all runs of a sweep end, and are evaluated, at the same samples.

    Parameters
    ----------
    config : RunConfig
    global_batches : collection of int
        All global batches that the sweep launches.

    Raises
    ------
    ConfigError
        With the nearest values that would work.
    """
    common = math.lcm(*global_batches)
    several = ", ".join(map(str, sorted(global_batches)))
    rule = (
        f"the global batch {several}"
        if len(global_batches) == 1
        else (f"{common}, the least common multiple of the global batches {several}")
    )
    length = config.sequence_length or 1
    for name, value, unit in (
        ("budget.samples", config.budget.samples, common),
        ("budget.tokens", config.budget.tokens, common * length),
        ("evaluation.every_samples", config.evaluation.every_samples, common),
    ):
        if value is not None and value % unit:
            tokens = f" x sequence_length {length}" if name == "budget.tokens" else ""
            below = value // unit * unit
            nearest = " or ".join(str(near) for near in (below, below + unit) if near)
            msg = f"{name} must be a multiple of {rule}{tokens}; given {value}; use {nearest}"
            raise ConfigError(msg)


def _budget_samples(config: RunConfig, global_batch_size: int) -> int:
    """Budget in samples; `check_multiples` has seen that it holds whole optimizer steps."""
    budget = config.budget
    if budget.optimizer_steps is not None:
        return budget.optimizer_steps * global_batch_size
    if budget.tokens is not None:
        return budget.tokens // (config.sequence_length or 1)
    if budget.samples is None:
        msg = "a budget has exactly one size"
        raise AssertionError(msg)
    return budget.samples


def _check_schedule(config: RunConfig, samples: int) -> None:
    schedule = config.schedule
    if not isinstance(schedule, Cosine):
        return
    end = schedule.decay_samples or samples
    if schedule.warmup_samples >= end:
        msg = (
            f"schedule.warmup_samples must be below the end of the decay; given "
            f"warmup_samples={schedule.warmup_samples}, the decay ends at {end} samples"
        )
        raise ConfigError(msg)


def _precision(config: RunConfig, device_type: str, machine: Machine) -> str:
    if config.engine.precision != "auto":
        return config.engine.precision
    native = device_type == "cuda" and all(
        device.compute_capability >= _NATIVE_BFLOAT16 for device in machine.cuda_devices
    )
    return "bfloat16" if native else "float32"
