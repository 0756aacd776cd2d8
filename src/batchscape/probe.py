"""The largest micro-batch that fits, found by a few short trainings with the global batch held."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from batchscape.config import Command, RunConfig
from batchscape.data.corpus import prepare
from batchscape.errors import ConfigError, LaunchError
from batchscape.geometry import BatchGeometry, enumerate_geometries
from batchscape.launch.launcher import Launcher
from batchscape.launch.oom_knowledge import ran_on
from batchscape.plan.build import make_plan
from batchscape.plan.expand import Cell, SweepCells, set_values
from batchscape.plan.machine import Machine
from batchscape.plan.memory import predict_memories
from batchscape.plan.room import room_gib
from batchscape.plan.stages import solve_geometries
from batchscape.record.files import read_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec, plain_geometry
from batchscape.record.status import RunStatus, Status
from batchscape.text import count_text

_STEPS = 3
"""Optimizer steps of a training: the first makes the optimizer's state, later ones are steady."""
_TAKEN_OF_TENSORS = 1.1
"""Memory that a limit counts over that of tensors. CUDA: blocks that the allocator rounds up and
keeps: 1.01 to 1.2 times as much when its rules are replayed. CPU: libraries and Python."""
_SHORT_RUN: dict[str, Any] = {
    "budget.samples": None,
    "budget.tokens": None,
    "budget.optimizer_steps": _STEPS,
    "budget.target_loss": None,
    "evaluation.every_samples": None,
    "batch.ramp": [],
    "checkpoint.every_s": None,
    "measure.warmup_optimizer_steps": 0,
    "launcher.skip_unfit": False,
}
"""Settings that do not change the peak of memory, for a short run that starts in any case."""


@dataclass(frozen=True)
class TriedMicroBatch:
    """The outcome of a real training with one micro-batch."""

    geometry: BatchGeometry
    fits: bool
    taken_gib: float | None = None
    """Memory that is compared with the limit; None where it does not fit."""
    run_id: str = ""


@dataclass(frozen=True)
class LargestMicroBatch:
    """The largest micro-batch that fits, and the trainings that were needed to find it."""

    candidates: tuple[BatchGeometry, ...]
    """All geometries of the global batch on these devices, by micro-batch."""
    predicted_gib: tuple[float, ...] | None
    """Peak of tensors of each; None: it cannot be predicted, for `unpredicted`."""
    unpredicted: str | None
    limit_gib: float
    """Memory of a device."""
    attempts: tuple[TriedMicroBatch, ...]

    @property
    def largest(self) -> BatchGeometry | None:
        """The last that fits; None where the smallest does not."""
        fitting = [attempt.geometry for attempt in self.attempts if attempt.fits]
        return max(fitting, key=lambda geometry: geometry.micro_batch_size, default=None)


def probe(grid: SweepCells, machine: Machine, console: Console) -> LargestMicroBatch:
    """Find the largest micro-batch by short trainings, each in processes of its own.

    The grid has one cell, whose global batch and devices are held.
    """
    if len(grid.cells) > 1:
        msg = f"`probe` is about one combination of settings; given {len(grid.cells)}"
        raise ConfigError(msg)
    settings = _short_settings(grid.cells[0].settings, machine)
    candidates = _candidates(settings)
    sweep, specs = _plan_trainings(grid, settings, candidates, machine)
    limit_gib = _limit_gib(specs[0], machine)
    reports = predict_memories(specs)
    peaks_gib = [r.peak_allocated_gib for r in reports if r.peak_allocated_gib is not None]
    predicted_gib = tuple(peaks_gib) if len(peaks_gib) == len(reports) else None
    by_geometry = dict(zip(candidates, specs, strict=True))
    guess = unpredicted = None
    if predicted_gib is None:
        unpredicted = next(report.problem for report in reports if report.problem is not None)
    else:
        guess = sum(_TAKEN_OF_TENSORS * gib <= limit_gib for gib in predicted_gib) - 1

    def train(geometry: BatchGeometry) -> TriedMicroBatch:
        spec = by_geometry[geometry]
        name = f"micro-batch {geometry.micro_batch_size}"
        with console.status(f"training with {name}"), Path(os.devnull).open("w") as null_file:
            result = Launcher(sweep, machine, [spec], console=Console(file=null_file)).run()
        if result.interrupted:
            raise KeyboardInterrupt
        if result.stopped is not None:
            raise LaunchError(result.stopped)
        folder = sweep.run(spec.run_id)
        status = RunStatus.read(folder.status)
        fits = status.status is Status.COMPLETED
        if not fits and status.status is not Status.OOM:
            ending = f"ended as {status.status}: {status.reason}"
            msg = f"the training with {geometry} {ending}; log: {folder.log}"
            raise LaunchError(msg)
        console.print(f"{name} {'fits' if fits else 'is out of memory'}")
        figure = "peak_taken_gib" if spec.device_type == "cpu" else "peak_reserved_gib"
        taken_gib = status.summary.get(figure) if fits else None
        return TriedMicroBatch(geometry, fits, taken_gib, spec.run_id)

    attempts = seek_largest(candidates, guess, train)
    return LargestMicroBatch(candidates, predicted_gib, unpredicted, limit_gib, tuple(attempts))


def seek_largest(
    candidates: Sequence[BatchGeometry],
    guess: int | None,
    train: Callable[[BatchGeometry], TriedMicroBatch],
) -> list[TriedMicroBatch]:
    """Train geometries until the last that fits and the first that does not are neighbours.

    Candidates are in the order of their micro-batches. `guess` is the position of the last that
    should fit, -1 for none: a right one takes two trainings at most, and without one the search is
    by halves.
    """
    attempts: list[TriedMicroBatch] = []
    last_fitting, first_failing = -1, len(candidates)
    while first_failing - last_fitting > 1:
        position = (last_fitting + first_failing) // 2
        if guess is not None and not attempts:
            position = max(guess, 0)
        elif guess is not None and len(attempts) == 1:
            position = last_fitting + 1 if attempts[0].fits else first_failing - 1
        attempts.append(train(candidates[position]))
        if attempts[-1].fits:
            last_fitting = position
        else:
            first_failing = position
    return attempts


def fits_by_micro_batch(
    grid: SweepCells,
    settings: dict[str, Any],
    geometries: Sequence[BatchGeometry],
    machine: Machine,
) -> dict[int, bool]:
    """Return which micro-batches fit, of those that `probe` has trained on devices like these."""
    sweep, specs = _plan_trainings(grid, _short_settings(settings, machine), geometries, machine)
    fits = {}
    for spec in specs:
        folder = sweep.run(spec.run_id)
        if not folder.launch.exists() or not ran_on(machine, spec, read_json(folder.launch)):
            continue
        status = RunStatus.read(folder.status).status
        if status in {Status.COMPLETED, Status.OOM}:
            fits[spec.geometry.micro_batch_size] = status is Status.COMPLETED
    return fits


def show_answer(console: Console, answer: LargestMicroBatch) -> None:
    """Print the trainings and the answer."""
    table = Table("micro-batch", "accumulation", box=box.SIMPLE_HEAD)
    for header in ("tensors, predicted (GiB)", "taken (GiB)", "outcome"):
        table.add_column(header)
    for attempt in answer.attempts:
        position = answer.candidates.index(attempt.geometry)
        predicted_gib = None if answer.predicted_gib is None else answer.predicted_gib[position]
        table.add_row(
            str(attempt.geometry.micro_batch_size),
            str(attempt.geometry.gradient_accumulation_steps),
            "" if predicted_gib is None else f"{predicted_gib:.4g}",
            "" if attempt.taken_gib is None else f"{attempt.taken_gib:.4g}",
            "fits" if attempt.fits else "out of memory",
        )
    console.print(table)
    if answer.unpredicted is not None:
        console.print(f"Not predicted: {answer.unpredicted}")
    console.print(_answer(answer), soft_wrap=True)


def as_json(answer: LargestMicroBatch) -> str:
    """Write the same as JSON."""
    return json.dumps(
        {
            "largest": None if answer.largest is None else plain_geometry(answer.largest),
            "limit_gib": answer.limit_gib,
            "candidates": [geometry.micro_batch_size for geometry in answer.candidates],
            "predicted_gib": answer.predicted_gib,
            "tried": [
                {
                    **plain_geometry(attempt.geometry),
                    "fits": attempt.fits,
                    "taken_gib": attempt.taken_gib,
                    "run_id": attempt.run_id,
                }
                for attempt in answer.attempts
            ],
        },
        indent=2,
    )


def _answer(answer: LargestMicroBatch) -> str:
    count = count_text(len(answer.attempts), "training")
    limits = (
        f"of {answer.limit_gib:.4g} GiB, by {count} with {len(answer.candidates)} to choose from"
    )
    if answer.largest is None:
        smallest = answer.candidates[0].micro_batch_size
        return (
            f"No micro-batch fits a device {limits}: not even {smallest}. Shard the state "
            "(engine=fsdp), recompute activations (engine.activation_checkpointing=true), or take "
            "a smaller model or sequence."
        )
    best = answer.largest
    rank = (
        "all fit; the largest is" if best == answer.candidates[-1] else "the largest that fits is"
    )
    return (
        f"Of the micro-batches of global batch {best.global_batch_size} on "
        f"{count_text(best.data_parallel_size, 'device')} {limits}, {rank} "
        f"{best.micro_batch_size}:\n  batch.micro_batch_size={best.micro_batch_size} "
        f"batch.gradient_accumulation_steps={best.gradient_accumulation_steps}"
    )


def _short_settings(settings: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """Return settings for a few steps that take as much memory as the whole training."""
    settings = set_values(settings, _SHORT_RUN)
    settings |= {"schedule": {"name": "constant", "warmup_samples": 0}, "tracker": {"name": "none"}}
    evaluation = settings["evaluation"] = {**settings["evaluation"]}
    evaluation["samples"] = min(evaluation["samples"], evaluation["batch_size"])
    measure = settings["measure"] = {**settings["measure"]}
    if measure["noise_scale_every"] is not None:
        measure["noise_scale_every"] = _STEPS - 1  # which takes memory, and must be among them
    if machine.device_type(RunConfig.from_mapping(settings).launcher) == "cpu":
        measure["memory"] = False  # a rehearsal of tensors; the limit is of the whole process
    return settings


def _candidates(settings: dict[str, Any]) -> tuple[BatchGeometry, ...]:
    """List all geometries of the global batch on these devices."""
    batch = settings["batch"]
    # A given global batch leaves micro-batch and accumulation free; otherwise they determine it.
    if batch["global_batch_size"] is not None or batch["global_batch_tokens"] is not None:
        free_values = {"batch.micro_batch_size": 1, "batch.gradient_accumulation_steps": None}
        settings = set_values(settings, free_values)
    planned = solve_geometries(RunConfig.from_mapping(settings))[-1]
    return tuple(
        enumerate_geometries(
            planned.global_batch_size,
            data_parallel_sizes=[planned.data_parallel_size],
            nodes=planned.nodes,
        )
    )


def _plan_trainings(
    grid: SweepCells,
    settings: dict[str, Any],
    candidates: Sequence[BatchGeometry],
    machine: Machine,
) -> tuple[SweepFolder, list[RunSpec]]:
    """Plan a short training of every candidate, in one folder that later calls find again."""
    keys = ("batch.micro_batch_size", "batch.gradient_accumulation_steps")
    cells = []
    for geometry in candidates:
        cut = (geometry.micro_batch_size, geometry.gradient_accumulation_steps)
        values = dict(zip(keys, cut, strict=True))
        cells.append(Cell(set_values(settings, values), values))
    # One folder for all batches and machines of these settings.
    fixed = {
        key: value
        for key, value in grid.fixed.items()
        if re.split(r"[./]", key.lstrip("+~"))[0] not in {"batch", "cluster"}
    }
    plan = make_plan(replace(grid, cells=cells, fixed=fixed, sweep_file="probe"), machine, prepare)
    if plan.rejections:
        raise ConfigError(str(plan.rejections[0].reason))
    if isinstance(plan.specs[0].config.engine, Command):
        msg = "`probe` trains for a few steps, which a program of engine=command decides by itself"
        raise ConfigError(msg)
    return SweepFolder(plan.sweep_dir), plan.specs


def _limit_gib(spec: RunSpec, machine: Machine) -> float:
    limit = room_gib(spec, machine)
    if limit is None or (spec.device_type == "cpu" and spec.config.device.memory_limit_gib is None):
        msg = (
            "`probe` runs out of memory on purpose, which on a CPU takes the whole machine along: "
            "give a device.memory_limit_gib, such as 2"
        )
        raise ConfigError(msg)
    return limit
