"""The largest micro-batch that fits, found by a few short trainings with the global batch held."""

from __future__ import annotations

import math
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

CUT = ("nodes", "data_parallel_size", "micro_batch_size", "gradient_accumulation_steps")
"""Settings of the group `batch` that cut a global batch."""
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
_OUTCOMES = {True: "fits", False: "is out of memory"}
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
    "schedule": {"name": "constant", "warmup_samples": 0},
    "tracker": {"name": "none"},
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
    # What a probe replaces may be wrong in the settings.
    batch = solve_batch(set_values(grid.cells[0].settings, _SHORT_RUN), "micro_batch_size")
    candidates = enumerate_geometries(
        batch.global_batch_size, data_parallel_sizes=[batch.data_parallel_size], nodes=batch.nodes
    )
    sweep, specs = _plan_trainings(grid, candidates, machine)
    is_on_cpu = specs[0].device_type == "cpu"
    limit_gib = room_gib(specs[0], machine)
    if limit_gib is None or (is_on_cpu and specs[0].config.device.memory_limit_gib is None):
        raise ConfigError(
            "`probe` runs out of memory on purpose, which on a CPU takes the whole machine along: "
            "give a device.memory_limit_gib, such as 2"
        )
    reports = predict_memories(specs)
    peaks_gib = [r.peak_allocated_gib for r in reports if r.peak_allocated_gib is not None]
    is_predicted = len(peaks_gib) == len(reports)
    guess = sum(_TAKEN_OF_TENSORS * gib <= limit_gib for gib in peaks_gib) - 1
    tried: list[dict[str, Any]] = []

    def fits(position: int) -> bool:
        spec = specs[position]
        micro = spec.geometry.micro_batch_size
        with (
            console.status(f"training with micro-batch {micro}"),
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
            raise LaunchError(
                f"the training with {spec.geometry} ended as {status.status}: {status.reason}; "
                f"log: {folder.log}"
            )
        taken_gib = status.summary.get("peak_taken_gib" if is_on_cpu else "peak_reserved_gib")
        attempt = {"fits": is_fitting, "taken_gib": taken_gib if is_fitting else None}
        tried.append(plain_geometry(spec.geometry) | attempt | {"run_id": spec.run_id})
        console.print(f"micro-batch {micro} {_OUTCOMES[is_fitting]}")
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


def known_bounds(
    grid: SweepCells, geometries: Sequence[BatchGeometry], machine: Machine
) -> tuple[int, float]:
    """Return the largest micro-batch that `probe` saw fit here, and the smallest that did not.

    They are 0 and infinity where it has tried none on devices like these.
    """
    sweep, specs = _plan_trainings(grid, geometries, machine)
    fitting, failing = 0, math.inf
    for spec in specs:
        folder, micro = sweep.run(spec.run_id), spec.geometry.micro_batch_size
        if folder.launch.exists() and ran_on(machine, spec, read_json(folder.launch)):
            status = RunStatus.read(folder.status).status
            if status is Status.COMPLETED:
                fitting = max(fitting, micro)
            elif status is Status.OOM:
                failing = min(failing, micro)
    return fitting, failing


def show_answer(console: Console, answer: Mapping[str, Any]) -> None:
    """Print the trainings and the answer."""
    micros, best = answer["candidates"], answer["largest"]
    predicted = dict(zip(micros, answer["predicted_gib"] or (), strict=False))
    table = Table(
        *("micro-batch", "accumulation", "tensors, predicted (GiB)", "taken (GiB)", "outcome"),
        box=box.SIMPLE_HEAD,
    )
    for attempt in answer["tried"]:
        micro = attempt["micro_batch_size"]
        sizes = (predicted.get(micro), attempt["taken_gib"])
        table.add_row(
            *(str(micro), str(attempt["gradient_accumulation_steps"])),
            *("" if size is None else f"{size:.4g}" for size in sizes),
            _OUTCOMES[attempt["fits"]],
        )
    console.print(table)
    if answer["not_predicted"] is not None:
        console.print(f"Not predicted: {answer['not_predicted']}")
    limits = (
        f"of {answer['limit_gib']:.4g} GiB, by {count_text(len(answer['tried']), 'training')} with "
        f"{len(micros)} to choose from"
    )
    if best is None:
        text = f"No micro-batch fits a device {limits}: not even {micros[0]}. {ADVICE}"
    else:
        micro, devices = best["micro_batch_size"], count_text(best["data_parallel_size"], "device")
        which = "all fit; the largest is" if micro == micros[-1] else "the largest that fits is"
        text = (
            f"Of the micro-batches of global batch {best['global_batch_size']} on {devices} "
            f"{limits}, {which} {micro}:\n  batch.micro_batch_size={micro} "
            f"batch.gradient_accumulation_steps={best['gradient_accumulation_steps']}"
        )
    console.print(text, soft_wrap=True)


def solve_batch(settings: dict[str, Any], *free: str) -> BatchGeometry:
    """Return the geometry of settings.

    Where they give a global batch, factors of its cut that are `free` become 1, and accumulation
    follows.
    """
    batch = settings["batch"]
    if batch["global_batch_size"] is not None or batch["global_batch_tokens"] is not None:
        values = {f"batch.{name}": 1 for name in free}
        settings = set_values(settings, values | {"batch.gradient_accumulation_steps": None})
    return solve_geometries(RunConfig.from_mapping(settings))[-1]


def group_of(word: str) -> str:
    """Return the group of a key or a setting of the command line."""
    return re.split(r"[./=]", word.lstrip("+~"))[0]


def plan_cuts(
    grid: SweepCells, geometries: Sequence[BatchGeometry], machine: Machine
) -> tuple[SweepFolder, list[RunSpec]]:
    """Plan the geometries of a global batch, with the other settings of the grid's only cell."""
    cells = []
    for geometry in geometries:
        cut = {f"batch.{name}": getattr(geometry, name) for name in CUT}
        batch = {"global_batch_size": geometry.global_batch_size, "global_batch_tokens": None}
        values = cut | {f"batch.{name}": value for name, value in batch.items()}
        cells.append(Cell(set_values(grid.cells[0].settings, values), {}))
    plan = make_plan(replace(grid, cells=cells), machine, prepare)
    if plan.rejections:
        raise ConfigError(str(plan.rejections[0].reason))
    return SweepFolder(plan.sweep_dir), plan.specs


def _plan_trainings(
    grid: SweepCells, geometries: Sequence[BatchGeometry], machine: Machine
) -> tuple[SweepFolder, list[RunSpec]]:
    """Plan trainings of a few steps that take as much memory as the whole ones.

    Their folder is one for all batches and machines of these settings, which later calls find.
    """
    settings = grid.cells[0].settings
    evaluation, changes = settings["evaluation"], dict(_SHORT_RUN)
    changes["evaluation.samples"] = min(evaluation["samples"], evaluation["batch_size"])
    if settings["measure"]["noise_scale_every"] is not None:
        changes["measure.noise_scale_every"] = _STEPS - 1  # it takes memory: among the steps
    config = RunConfig.from_mapping(set_values(settings, changes))
    if isinstance(config.engine, Command):
        raise ConfigError(
            "`probe` trains for a few steps, which a program of engine=command decides by itself"
        )
    if machine.device_type(config.launcher) == "cpu":
        changes["measure.memory"] = False  # a rehearsal of tensors; the limit is of the process
    cells = [Cell(set_values(settings, changes), {})]
    fixed = {k: value for k, value in grid.fixed.items() if group_of(k) not in {"batch", "cluster"}}
    short_grid = replace(grid, cells=cells, fixed=fixed, sweep_file="probe")
    return plan_cuts(short_grid, geometries, machine)
