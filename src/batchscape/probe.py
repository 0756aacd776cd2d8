"""The largest micro-batch that fits, found by a few short trainings with the global batch held."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
ADVICE = (
    "Shard the state (engine=fsdp), recompute activations (engine.activation_checkpointing=true), "
    "or take a smaller model or sequence."
)
"""What makes room where nothing fits."""
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


def probe(grid: SweepCells, machine: Machine, console: Console) -> dict[str, Any]:
    """Find the largest micro-batch by short trainings, each in processes of its own.

    The grid has one cell, whose global batch and devices are held. The answer is what JSON holds:
    the `largest` geometry (None where not even the smallest fits), the `limit_gib` of a device, the
    micro-batches that there are with the `predicted_gib` of their tensors (None where they are
    `not_predicted`, with the reason), and the trainings that were `tried`.
    """
    if len(grid.cells) > 1:
        raise ConfigError(f"`probe` is about one combination of settings; given {len(grid.cells)}")
    settings = _short_settings(grid.cells[0].settings, machine)
    candidates = _candidates(settings)
    sweep, specs = _plan_trainings(grid, settings, candidates, machine)
    limit_gib = _limit_gib(specs[0], machine)
    reports = predict_memories(specs)
    peaks_gib = [r.peak_allocated_gib for r in reports if r.peak_allocated_gib is not None]
    is_predicted = len(peaks_gib) == len(reports)
    guess = sum(_TAKEN_OF_TENSORS * gib <= limit_gib for gib in peaks_gib) - 1
    tried: list[dict[str, Any]] = []

    def fits(position: int) -> bool:
        spec = specs[position]
        with (
            console.status(f"training with micro-batch {spec.geometry.micro_batch_size}"),
            Path(os.devnull).open("w") as null_file,
        ):
            result = Launcher(sweep, machine, [spec], console=Console(file=null_file)).run()
        if result.interrupted:
            raise KeyboardInterrupt
        if result.why_stopped is not None:
            raise LaunchError(result.why_stopped)
        folder = sweep.run(spec.run_id)
        status = RunStatus.read(folder.status)
        is_fitting = status.status is Status.COMPLETED
        if not is_fitting and status.status is not Status.OOM:
            ending = f"ended as {status.status}: {status.reason}"
            raise LaunchError(f"the training with {spec.geometry} {ending}; log: {folder.log}")
        figure = "peak_taken_gib" if spec.device_type == "cpu" else "peak_reserved_gib"
        attempt = {
            **plain_geometry(spec.geometry),
            "fits": is_fitting,
            "taken_gib": status.summary.get(figure) if is_fitting else None,
            "run_id": spec.run_id,
        }
        tried.append(attempt)
        console.print(f"micro-batch {attempt['micro_batch_size']} {_outcome(attempt)}")
        return is_fitting

    largest = seek_largest(len(candidates), guess if is_predicted else None, fits)
    return {
        "largest": None if largest < 0 else plain_geometry(candidates[largest]),
        "limit_gib": limit_gib,
        "candidates": [geometry.micro_batch_size for geometry in candidates],
        "predicted_gib": peaks_gib if is_predicted else None,
        "not_predicted": next((r.problem for r in reports if r.problem is not None), None),
        "tried": tried,
    }


def seek_largest(count: int, guess: int | None, fits: Callable[[int], bool]) -> int:
    """Return the position of the last of several candidates that fits, -1 for none.

    A smaller one fits where a larger one does. `guess` is the position that is expected: a right
    one takes two trainings at most, and without one the search is by halves.
    """
    last_fitting, first_failing, tries = -1, count, 0
    while first_failing - last_fitting > 1:
        position = (last_fitting + first_failing) // 2
        if guess is not None and tries == 0:
            position = max(guess, 0)
        elif guess is not None and tries == 1:
            position = last_fitting + 1 if last_fitting >= 0 else first_failing - 1
        tries += 1
        if fits(position):
            last_fitting = position
        else:
            first_failing = position
    return last_fitting


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


def _outcome(attempt: Mapping[str, Any]) -> str:
    return "fits" if attempt["fits"] else "is out of memory"


def show_answer(console: Console, answer: Mapping[str, Any]) -> None:
    """Print the trainings and the answer."""
    candidates, predicted_gib = answer["candidates"], answer["predicted_gib"]
    table = Table(
        *("micro-batch", "accumulation", "tensors, predicted (GiB)", "taken (GiB)", "outcome"),
        box=box.SIMPLE_HEAD,
    )
    for attempt in answer["tried"]:
        micro, taken_gib = attempt["micro_batch_size"], attempt["taken_gib"]
        tensors = f"{predicted_gib[candidates.index(micro)]:.4g}" if predicted_gib else ""
        taken = "" if taken_gib is None else f"{taken_gib:.4g}"
        steps = attempt["gradient_accumulation_steps"]
        table.add_row(str(micro), str(steps), tensors, taken, _outcome(attempt))
    console.print(table)
    if answer["not_predicted"] is not None:
        console.print(f"Not predicted: {answer['not_predicted']}")
    limits = (
        f"of {answer['limit_gib']:.4g} GiB, by {count_text(len(answer['tried']), 'training')} with "
        f"{len(candidates)} to choose from"
    )
    best = answer["largest"]
    if best is None:
        text = f"No micro-batch fits a device {limits}: not even {candidates[0]}. {ADVICE}"
    else:
        micro = best["micro_batch_size"]
        all_fit = micro == candidates[-1]
        text = (
            f"Of the micro-batches of global batch {best['global_batch_size']} on "
            f"{count_text(best['data_parallel_size'], 'device')} {limits}, "
            f"{'all fit; the largest is' if all_fit else 'the largest that fits is'} {micro}:\n"
            f"  batch.micro_batch_size={micro} "
            f"batch.gradient_accumulation_steps={best['gradient_accumulation_steps']}"
        )
    console.print(text, soft_wrap=True)


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
        raise ConfigError(
            "`probe` trains for a few steps, which a program of engine=command decides by itself"
        )
    return SweepFolder(plan.sweep_dir), plan.specs


def _limit_gib(spec: RunSpec, machine: Machine) -> float:
    limit = room_gib(spec, machine)
    if limit is None or (spec.device_type == "cpu" and spec.config.device.memory_limit_gib is None):
        raise ConfigError(
            "`probe` runs out of memory on purpose, which on a CPU takes the whole machine along: "
            "give a device.memory_limit_gib, such as 2"
        )
    return limit
