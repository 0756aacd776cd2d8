"""The practitioners' recipe for the cut of a global batch before anything was measured.

The largest micro-batch that fits, all devices, accumulation for the rest, a learning rate for the
global batch; each with its basis. Source: `docs/planning.md`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Column, Table

from batchscape.analysis.decisions.config_files import config_values
from batchscape.config import Command, DeepSpeed, Fsdp, RunConfig
from batchscape.data.corpus import prepare
from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry, enumerate_geometries
from batchscape.interop.write import write_configs
from batchscape.plan.build import make_plan
from batchscape.plan.expand import Cell, SweepCells, set_values
from batchscape.plan.forecast import RunForecast
from batchscape.plan.forecast_text import COUNTS, memory_text, span
from batchscape.plan.machine import Machine
from batchscape.plan.stages import solve_geometries
from batchscape.predictor import predict
from batchscape.probe import ADVICE, fits_by_micro_batch
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec, plain_geometry
from batchscape.text import DURATIONS, list_text, near_multiples

StepBasis = Literal["predicted", "measured", "given", "computed"]
_CUT = dict.fromkeys(
    (
        *("batch.nodes", "batch.data_parallel_size"),
        *("batch.micro_batch_size", "batch.gradient_accumulation_steps"),
    )
)
_BATCH = _CUT | dict.fromkeys(("batch.global_batch_size", "batch.global_batch_tokens"))


Step = dict[str, str]
"""One decision: its name, value, reason and basis."""


@dataclass(frozen=True)
class Cut:
    """One micro-batch that the devices could take."""

    spec: RunSpec
    fits: bool | None
    """None: not known."""
    basis: StepBasis
    forecast: RunForecast

    @property
    def geometry(self) -> BatchGeometry:
        """Of its only stage."""
        return self.spec.geometry


@dataclass(frozen=True)
class Recipe:
    """A cut of one global batch, and why."""

    chosen: Cut | None
    content: dict[str, Any]
    """The whole answer as JSON: `why_not` where none is chosen, every cut that was compared, and
    the commands for the machine itself."""


def follow_recipe(
    grid: SweepCells,
    machine: Machine,
    words: Sequence[str],
    *,
    devices: int | None = None,
    runs: Sequence[Path] = (),
) -> Recipe:
    """Cut the global batch of one combination of settings for a machine.

    `words` are the settings of the command line, `devices` a limit, and `runs` sweep folders for
    the prediction of step times.
    """
    if len(grid.cells) > 1:
        raise ConfigError(f"a recipe is for one combination of settings; given {len(grid.cells)}")
    keys = [word.partition("=")[0].lstrip("+~") for word in words]
    if chosen_keys := [key for key in keys if key in _CUT or key.startswith("batch.ramp")]:
        raise ConfigError(
            f"a recipe chooses the cut of batch.global_batch_size by itself; given "
            f"{', '.join(chosen_keys)}; leave that out, or give --devices N"
        )
    settings = set_values(grid.cells[0].settings, {"batch.ramp": []})
    batch_size = _global_batch_size(settings)
    config = RunConfig.from_mapping(settings)
    if isinstance(config.engine, Command):
        raise ConfigError(
            "only a program of engine=command itself knows its memory, so that no cut can be "
            "recommended before it ran; sweep some cuts, and recommend from their folder"
        )
    device_count = machine.devices(machine.device_type(config.launcher))
    if devices is not None and not 1 <= devices <= device_count:
        raise ConfigError(
            f"devices must be from 1 to the {device_count} of this machine; given {devices}. For a "
            "machine that is not this one: cluster=NAME cluster.devices_per_node=N cluster.nodes=N"
        )
    device_limit = devices or device_count
    cuts = _cuts(grid, settings, batch_size, device_limit, machine, runs=runs)
    chosen, why_not = _choose(cuts)
    size = 0 if chosen is None else chosen.geometry.micro_batch_size
    may_fit = [cut.geometry.micro_batch_size for cut in cuts if cut.fits is None]
    probe, run = _commands(words, chosen or cuts[0])
    content: dict[str, Any] = {
        "global_batch_size": batch_size,
        "hardware": f"{device_count} cores of {machine.cpu_name}"
        if cuts[0].spec.device_type == "cpu"
        else f"{device_count} x {machine.cuda_devices[0].name}",
        "geometry": None,
        "why_not": why_not,
        "steps": [],
        "config": {},
        "command": None,
        "probe_command": probe,
        "to_try": [micro for micro in may_fit if micro >= size],
        "cuts": [
            plain_geometry(cut.geometry)
            | {"fits": cut.fits, "basis": cut.basis, "forecast": asdict(cut.forecast)}
            for cut in cuts
        ],
    }
    if chosen is not None:
        content |= {
            "geometry": plain_geometry(chosen.geometry),
            "steps": _steps(chosen, device_count, device_limit, cuts),
            "config": config_values(chosen.geometry),
            "command": run,
        }
    return Recipe(chosen, content)


def _commands(words: Sequence[str], cut: Cut) -> tuple[str | None, str | None]:
    """Return the command that probes micro-batches on the machine itself, and the one of a cut."""
    geometry, spec = cut.geometry, cut.spec
    if geometry.nodes > 1:
        return None, None  # runs are launched on one node
    settings = [
        word
        for word in words
        if re.split(r"[./=]", word.lstrip("+~"))[0] not in {"batch", "cluster"}
    ]
    settings += [
        f"batch.global_batch_size={geometry.global_batch_size}",
        f"batch.data_parallel_size={geometry.data_parallel_size}",
    ]
    cut_settings = [
        f"batch.micro_batch_size={geometry.micro_batch_size}",
        f"batch.gradient_accumulation_steps={geometry.gradient_accumulation_steps}",
    ]
    # The probe runs out of memory on purpose, which is safe on a CPU only with a limit.
    is_safe = spec.device_type == "cuda" or spec.config.device.memory_limit_gib is not None
    probe = shlex.join(["batchscape", "probe", *settings]) if is_safe else None
    return probe, shlex.join(["batchscape", "run", *settings, *cut_settings])


def write_files(recipe: Recipe, out: Path) -> list[Path]:
    """Write the configuration files of other systems for the chosen cut."""
    if recipe.chosen is None:
        raise ConfigError(f"no files are written to {out}: {recipe.content['why_not']}")
    spec = recipe.chosen.spec
    engine = spec.config.engine
    stage = engine.zero_stage if isinstance(engine, DeepSpeed) else 1
    return write_configs(
        spec.geometry,
        out,
        precision=spec.precision,
        gradient_clip_norm=spec.stages[-1].optimizer.gradient_clip_norm,
        zero_stage=3 if isinstance(engine, Fsdp) else stage,
    )


def show_recipe(console: Console, recipe: Recipe) -> None:
    """Print the recipe, the values of configuration files, and the micro-batches to probe."""
    content, chosen = recipe.content, recipe.chosen
    batch = f"batch {content['global_batch_size']} on {content['hardware']}"
    if chosen is None:
        console.print(f"No cut of global {batch}: {content['why_not']}", soft_wrap=True)
    else:
        console.print(f"Global {batch}: {chosen.geometry}")
        table = Table(
            *("", "", Column("why", overflow="fold"), "from"), box=box.SIMPLE_HEAD, pad_edge=False
        )
        for number, step in enumerate(content["steps"], start=1):
            table.add_row(f"{number}. {step['name']}", step["value"], step["reason"], step["basis"])
        console.print(table)
    probe = content["probe_command"]
    if content["to_try"]:
        advice = "the machine itself tells, and this then says measured"
        if probe is None:
            advice = (
                "`batchscape probe` tells on one machine, on a CPU with a device.memory_limit_gib"
            )
        console.print(f"Not sure to fit: micro-batch {list_text(content['to_try'], '')}; {advice}")
        if probe is not None:
            console.print(f"  {probe}", soft_wrap=True)
    if chosen is None:
        return
    console.print("\nWhat every config file must say")
    for system, keys in content["config"].items():
        values = list_text((f"{name}={value}" for name, value in keys.items()), "")
        console.print(f"  {system}: {values}")
    if content["command"] is not None:
        console.print(f"\n{content['command']}", soft_wrap=True)


def _global_batch_size(settings: dict[str, Any]) -> int:
    """Return the global batch of settings without their cut."""
    batch = settings["batch"]
    if batch["global_batch_size"] is not None or batch["global_batch_tokens"] is not None:
        smallest_cut = {
            "batch.nodes": 1,
            "batch.data_parallel_size": 1,
            "batch.micro_batch_size": 1,
        }
        settings = set_values(settings, _CUT | smallest_cut)
    return solve_geometries(RunConfig.from_mapping(settings))[-1].global_batch_size


def _cuts(
    grid: SweepCells,
    settings: dict[str, Any],
    batch_size: int,
    device_limit: int,
    machine: Machine,
    *,
    runs: Sequence[Path],
) -> tuple[Cut, ...]:
    """Return all cuts over the most devices that divide the global batch, with their forecasts."""
    per_node = machine.devices(machine.device_type(RunConfig.from_mapping(settings).launcher))
    per_node //= machine.nodes
    counts = ((ranks, -(-ranks // per_node)) for ranks in range(device_limit, 0, -1))
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
    forecasts = predict(plan.specs, SweepFolder(plan.sweep_dir), machine, runs).runs
    fits_by_size: dict[int, bool] = {}
    if not machine.is_declared:
        fits_by_size = fits_by_micro_batch(grid, cells[0].settings, geometries, machine)
    fitting = max((size for size, fits in fits_by_size.items() if fits), default=0)
    failing = min((size for size, fits in fits_by_size.items() if not fits), default=batch_size + 1)
    cuts = []
    for spec in plan.specs:
        forecast, size = forecasts[spec.run_id], spec.geometry.micro_batch_size
        if size <= fitting or size >= failing:
            cuts.append(Cut(spec, size <= fitting, "measured", forecast))
            continue
        verdict = "" if forecast.memory is None else forecast.memory.fits
        fits = {"fits": True, "does not fit": False}.get(verdict or "")
        cuts.append(Cut(spec, fits, "predicted", forecast))
    return tuple(cuts)


def _choose(cuts: Sequence[Cut]) -> tuple[Cut | None, str | None]:
    """Return the largest cut that fits, else the smallest that may, else why there is none."""
    fitting = [cut for cut in cuts if cut.fits]
    if fitting:
        return fitting[-1], None
    if all(cut.fits is False for cut in cuts):
        return None, (
            f"not even micro-batch {cuts[0].geometry.micro_batch_size} fits a device. {ADVICE}"
        )
    uncertain_cut = next(cut for cut in cuts if cut.fits is None)
    memory = uncertain_cut.forecast.memory
    if memory is None or memory.peak_allocated_gib is None:
        return None, f"memory is {'' if memory is None else memory.way}."
    if memory.room_gib is None:
        return None, "the memory of the device is not known; give device.memory_limit_gib."
    return uncertain_cut, None


def _step(name: str, value: object, reason: str, basis: StepBasis) -> Step:
    return {"name": name, "value": str(value), "reason": reason, "basis": basis}


def _steps(chosen: Cut, device_count: int, device_limit: int, cuts: Sequence[Cut]) -> list[Step]:
    geometry, forecast, memory = chosen.geometry, chosen.forecast, chosen.forecast.memory
    ranks, micro = geometry.data_parallel_size, geometry.micro_batch_size
    why_micro_batch = "the largest there is" if chosen == cuts[-1] else "the largest that fits"
    if chosen.fits is None:
        why_micro_batch = "may fit; none does surely"
    if memory is not None and memory.room_gib is not None and (taken := memory_text(memory)):
        why_micro_batch += f": tensors take {taken} of {memory.room_gib:.3g} GiB"
    product = f"{geometry.global_batch_size} / ({ranks} x {micro})"
    steps = [
        _step("micro-batch", micro, why_micro_batch, chosen.basis),
        _step("devices", ranks, _why_devices(geometry, device_count, device_limit), "given"),
        _step("accumulation", geometry.gradient_accumulation_steps, product, "computed"),
        _learning_rate(chosen.spec),
    ]
    if forecast.step_time_s is None:
        return [*steps, _step("step time", "", forecast.way, "predicted")]
    rate = span(forecast.tokens_per_s or forecast.samples_per_s, COUNTS)
    kind = "tokens/s" if forecast.tokens_per_s else "samples/s"
    step, run = (span(time, DURATIONS) for time in (forecast.step_time_s, forecast.run_time_s))
    hours = f"{span(forecast.device_hours, {'': 1.0})} device-hours"
    return [
        *steps,
        _step("step time", step, f"{rate} {kind}; by {forecast.way}", "predicted"),
        _step("run time", run, hours, "predicted"),
    ]


def _why_devices(geometry: BatchGeometry, device_count: int, device_limit: int) -> str:
    batch_size, ranks = geometry.global_batch_size, geometry.data_parallel_size
    if ranks == device_limit:
        return (
            "all there are"
            if device_limit == device_count
            else f"as many as asked, of {device_count}"
        )
    if batch_size % device_limit == 0:
        return f"of {device_limit}, which cannot be spread evenly over nodes"
    near = near_multiples(batch_size, device_limit)
    return (
        f"of {device_limit}, which do not divide {batch_size}; a global batch of {near} has none "
        "idle"
    )


def _learning_rate(spec: RunSpec) -> Step:
    """Return the optimizer's learning rate for this global batch, and the rule."""
    rate, scaling = spec.stages[-1].optimizer.learning_rate, spec.config.scaling
    reference = scaling.reference_global_batch_size
    if reference is None or scaling.learning_rate == "none":
        reason = "as it is set; scaling=sqrt or linear with its reference batch rescales it"
        return _step("learning rate", f"{rate:.4g}", reason, "given")
    base = spec.config.optimizer.learning_rate
    ratio = f"{spec.geometry.global_batch_size} / {reference}"
    factor = f"sqrt({ratio})" if scaling.learning_rate == "sqrt" else ratio
    return _step("learning rate", f"{rate:.4g}", f"{base:.4g} x {factor}", "computed")
