"""How to cut a global batch before anything was measured: the recipe of practitioners, carried out.

The largest micro-batch that fits, all devices, accumulation for the rest, a learning rate for the
global batch; each with what it rests on. Source: `docs/planning.md`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Column, Table

from batchscape.analysis.decisions.config_files import config_values
from batchscape.config import RunConfig
from batchscape.data.corpus import prepare
from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry, enumerate_geometries
from batchscape.plan.build import make_plan
from batchscape.plan.expand import Cell, SweepCells, set_values
from batchscape.plan.forecast import RunForecast
from batchscape.plan.forecast_text import COUNTS, TIMES, memory_text, span
from batchscape.plan.machine import Machine
from batchscape.plan.stages import solve_geometries
from batchscape.predictor import predict
from batchscape.probe import known_of
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec

__all__ = ["Recipe", "follow_recipe", "recipe_json", "show_recipe"]

Basis = Literal["predicted", "measured", "given", "computed"]
_CUT = dict.fromkeys(
    (
        *("batch.nodes", "batch.devices_per_node", "batch.data_parallel_size"),
        *("batch.micro_batch_size", "batch.gradient_accumulation_steps"),
    )
)
_BATCH = _CUT | dict.fromkeys(("batch.global_batch_size", "batch.global_batch_tokens"))


@dataclass(frozen=True)
class Step:
    """One decision of the recipe."""

    name: str
    value: str
    reason: str
    basis: Basis


@dataclass(frozen=True)
class Cut:
    """One micro-batch that the devices could take."""

    geometry: BatchGeometry
    fits: bool | None
    """None: it may."""
    basis: Basis
    spec: RunSpec
    forecast: RunForecast


@dataclass(frozen=True)
class Recipe:
    """A cut of one global batch, and why."""

    global_batch_size: int
    hardware: str
    cuts: tuple[Cut, ...]
    """All of these devices, by micro-batch."""
    chosen: Cut | None
    why_not: str | None
    """Why none is chosen."""
    steps: tuple[Step, ...]
    command: str
    """Launches what is chosen, or asks for what would tell."""
    to_try: tuple[int, ...]
    """Larger micro-batches that may fit."""


def follow_recipe(
    grid: SweepCells,
    machine: Machine,
    words: Sequence[str],
    *,
    devices: int | None = None,
    runs: Sequence[Path] = (),
) -> Recipe:
    """Cut the global batch of one combination of settings for a machine.

    Parameters
    ----------
    grid : SweepCells
        One cell, whose global batch is held and whose cut is not.
    machine : Machine
        This one, or a declared one.
    words : sequence of str
        Settings of the command line, for the commands that are told.
    devices : int, optional
        Devices to use at most; all by default.
    runs : sequence of Path
        Sweep folders whose runs tell of step times.

    Raises
    ------
    ConfigError
        If there are several cells, or these settings cannot be planned.
    """
    if len(grid.cells) > 1:
        msg = f"a recipe is for one combination of settings; given {len(grid.cells)}"
        raise ConfigError(msg)
    settings = set_values(grid.cells[0].settings, {"batch.ramp": []})
    batch_size = _global_batch_size(settings)
    config = RunConfig.from_mapping(settings)
    there = machine.devices(machine.device_type(config.launcher))
    if devices is not None and not 1 <= devices <= there:
        msg = (
            f"devices must be from 1 to the {there} of this machine; given {devices}. For a "
            "machine that is not this one: cluster=NAME cluster.devices_per_node=N cluster.nodes=N"
        )
        raise ConfigError(msg)
    most = devices or there
    cuts = _cuts(grid, settings, batch_size, most, machine, runs=runs)
    chosen, why_not = _choose(cuts)
    geometry = cuts[0].geometry if chosen is None else chosen.geometry
    asked = [
        *(word for word in words if not word.startswith(("batch.", "cluster=", "cluster."))),
        f"batch.global_batch_size={batch_size}",
        f"batch.data_parallel_size={geometry.data_parallel_size}",
        *([f"batch.nodes={geometry.nodes}"] if geometry.nodes > 1 else []),
    ]
    command = ["batchscape", "probe", *asked]
    size = 0
    if chosen is not None:
        size = geometry.micro_batch_size
        command = ["batchscape", "run", *asked, f"batch.micro_batch_size={size}"]
    unsure = [cut.geometry.micro_batch_size for cut in cuts if cut.fits is None]
    return Recipe(
        batch_size,
        _named(machine, cuts[0].spec),
        cuts,
        chosen,
        why_not,
        () if chosen is None else _steps(chosen, most, cuts),
        shlex.join(command),
        tuple(each for each in unsure if each > size),
    )


def show_recipe(console: Console, recipe: Recipe) -> None:
    """Print the recipe, what every configuration file must say, and what is open."""
    for_what = f"global batch {recipe.global_batch_size} on {recipe.hardware}"
    chosen = recipe.chosen
    if chosen is None:
        console.print(f"No cut of {for_what}: {recipe.why_not}", soft_wrap=True)
    else:
        console.print(f"{for_what[0].upper()}{for_what[1:]}: {chosen.geometry}")
        table = Table(
            *("", "", Column("why", overflow="fold"), "from"), box=box.SIMPLE_HEAD, pad_edge=False
        )
        for number, step in enumerate(recipe.steps, start=1):
            table.add_row(f"{number}. {step.name}", step.value, step.reason, step.basis)
        console.print(table)
    if recipe.to_try:
        sizes = ", ".join(map(str, recipe.to_try))
        console.print(
            f"May fit too: micro-batch {sizes}; `batchscape probe` with the same settings tries "
            "them on the machine itself, and this then says measured."
        )
    if chosen is not None:
        console.print("\nWhat every config file must say")
        for system, keys in config_values(chosen.geometry).items():
            said = ", ".join(f"{name}={value}" for name, value in keys.items())
            console.print(f"  {system}: {said}")
    console.print(f"\n{recipe.command}", soft_wrap=True)


def recipe_json(recipe: Recipe) -> str:
    """Write the same as JSON, with every micro-batch that was compared."""
    chosen = recipe.chosen
    return json.dumps(
        {
            "global_batch_size": recipe.global_batch_size,
            "hardware": recipe.hardware,
            "geometry": None if chosen is None else _plain(chosen.geometry),
            "why_not": recipe.why_not,
            "steps": [asdict(step) for step in recipe.steps],
            "config": {} if chosen is None else config_values(chosen.geometry),
            "command": recipe.command,
            "to_try": recipe.to_try,
            "cuts": [
                {
                    **_plain(cut.geometry),
                    "fits": cut.fits,
                    "basis": cut.basis,
                    "forecast": asdict(cut.forecast),
                }
                for cut in recipe.cuts
            ],
        },
        indent=2,
    )


def _plain(geometry: BatchGeometry) -> dict[str, int]:
    return asdict(geometry) | {
        "data_parallel_size": geometry.data_parallel_size,
        "global_batch_size": geometry.global_batch_size,
    }


def _named(machine: Machine, spec: RunSpec) -> str:
    count = machine.devices(spec.device_type)
    if spec.device_type == "cpu":
        return f"{count} cores of {machine.cpu_name}"
    return f"{count} x {machine.cuda_devices[0].name}"


def _global_batch_size(settings: dict[str, Any]) -> int:
    """Return the global batch that is asked for, whatever its cut."""
    batch = settings["batch"]
    if batch["global_batch_size"] is not None or batch["global_batch_tokens"] is not None:
        one = {"batch.nodes": 1, "batch.data_parallel_size": 1, "batch.micro_batch_size": 1}
        settings = set_values(settings, _CUT | one)
    return solve_geometries(RunConfig.from_mapping(settings))[-1].global_batch_size


def _cuts(
    grid: SweepCells,
    settings: dict[str, Any],
    batch_size: int,
    most: int,
    machine: Machine,
    *,
    runs: Sequence[Path],
) -> tuple[Cut, ...]:
    """Return all cuts over as many devices as divide the global batch, and what they take."""
    per_node = machine.devices(machine.device_type(RunConfig.from_mapping(settings).launcher))
    per_node //= machine.nodes
    counts = ((ranks, -(-ranks // per_node)) for ranks in range(most, 0, -1))
    ranks, nodes = next((r, n) for r, n in counts if batch_size % r == 0 and r % n == 0)
    geometries = enumerate_geometries(batch_size, data_parallel_sizes=[ranks], nodes=nodes)
    cells = []
    for geometry in geometries:
        values = _BATCH | {
            "batch.nodes": nodes,
            "batch.data_parallel_size": ranks,
            "batch.micro_batch_size": geometry.micro_batch_size,
            "batch.global_batch_size": batch_size,
        }
        cells.append(Cell(set_values(settings, values), {}))
    fixed = {key: value for key, value in grid.fixed.items() if key not in _BATCH}
    plan = make_plan(replace(grid, cells=cells, fixed=fixed), machine, prepare)
    if plan.rejections:
        raise ConfigError(str(plan.rejections[0].reason))
    told = predict(plan.specs, SweepFolder(plan.sweep_dir), machine, runs).runs
    seen = {} if machine.is_declared else known_of(grid, cells[0].settings, geometries, machine)
    fitting = max((size for size, fits in seen.items() if fits), default=0)
    failing = min((size for size, fits in seen.items() if not fits), default=batch_size + 1)
    found = []
    for spec in plan.specs:
        forecast, size = told[spec.run_id], spec.geometry.micro_batch_size
        said = None if forecast.memory is None else forecast.memory.fits
        fits = {"fits": True, "does not fit": False}.get(said or "")
        if size <= fitting or size >= failing:
            found.append(Cut(spec.geometry, size <= fitting, "measured", spec, forecast))
        else:
            found.append(Cut(spec.geometry, fits, "predicted", spec, forecast))
    return tuple(found)


def _choose(cuts: Sequence[Cut]) -> tuple[Cut | None, str | None]:
    """Return the largest cut that fits, else the smallest that may, else why there is none."""
    fitting = [cut for cut in cuts if cut.fits]
    if fitting:
        return fitting[-1], None
    if all(cut.fits is False for cut in cuts):
        return None, (
            f"not even micro-batch {cuts[0].geometry.micro_batch_size} fits a device. Shard the "
            "state (engine=fsdp), recompute activations (engine.activation_checkpointing=true), "
            "or take a smaller model or sequence."
        )
    may = next(cut for cut in cuts if cut.fits is None)
    memory = may.forecast.memory
    if memory is None or memory.peak_allocated_gib is None:
        return None, f"memory is {'' if memory is None else memory.way}."
    return may, None


def _steps(chosen: Cut, most: int, cuts: Sequence[Cut]) -> tuple[Step, ...]:
    geometry, spec, forecast = chosen.geometry, chosen.spec, chosen.forecast
    batch_size, ranks = geometry.global_batch_size, geometry.data_parallel_size
    micro = geometry.micro_batch_size
    which = "the largest that fits" if chosen.fits else "the smallest; none fits surely"
    if chosen == cuts[-1]:
        which = "the largest there is"
    memory = forecast.memory
    taken = None if memory is None else memory_text(memory)
    if taken is not None and memory is not None and memory.room_gib is not None:
        which += f": tensors take {taken} of {memory.room_gib:.3g} GiB"
    devices = "all there are"
    if ranks < most:
        near = f"{batch_size // most * most or most} or {(batch_size // most + 1) * most}"
        devices = (
            f"of {most}, which do not divide {batch_size}; a global batch of {near} has none idle"
        )
    steps = [
        Step("micro-batch", str(micro), which, chosen.basis),
        Step("devices", str(ranks), devices, "given"),
        Step(
            "accumulation",
            str(geometry.gradient_accumulation_steps),
            f"{batch_size} / ({ranks} x {micro})",
            "computed",
        ),
        _learning_rate(spec),
    ]
    way: Basis = "measured" if forecast.way.startswith("measured") else "predicted"
    if forecast.step_time_s is not None:
        rate = forecast.tokens_per_s or forecast.samples_per_s
        kind = "tokens/s" if forecast.tokens_per_s else "samples/s"
        steps += [
            Step(
                "step time", span(forecast.step_time_s, TIMES), f"{span(rate, COUNTS)} {kind}", way
            ),
            Step(
                "run time",
                span(forecast.run_time_s, TIMES),
                f"{span(forecast.device_hours, ((1.0, ''),))} device-hours",
                way,
            ),
        ]
    return tuple(steps)


def _learning_rate(spec: RunSpec) -> Step:
    """Say what the optimizer is given for this global batch, and by which rule."""
    rate, scaling = spec.stages[-1].optimizer.learning_rate, spec.config.scaling
    reference = scaling.reference_global_batch_size
    if reference is None or scaling.learning_rate == "none":
        reason = "as it is set; scaling=sqrt or linear with its reference batch rescales it"
        return Step("learning rate", f"{rate:.4g}", reason, "given")
    base = spec.config.optimizer.learning_rate
    ratio = f"{spec.geometry.global_batch_size} / {reference}"
    by = f"sqrt({ratio})" if scaling.learning_rate == "sqrt" else ratio
    return Step("learning rate", f"{rate:.4g}", f"{base:.4g} x {by}", "computed")
