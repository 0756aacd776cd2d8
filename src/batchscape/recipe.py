"""The practitioners' recipe for the cut of a global batch before anything was measured.

The largest micro-batch that fits, all devices, accumulation for the rest, a learning rate for the
global batch; each with its basis. Source: `docs/planning.md`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table

from batchscape.analysis.decisions.config_files import config_values
from batchscape.config import Command, DeepSpeed, Fsdp, RunConfig
from batchscape.errors import ConfigError
from batchscape.geometry import BatchGeometry, enumerate_geometries
from batchscape.interop.write import write_configs
from batchscape.plan.expand import Cell, SweepCells, set_values
from batchscape.plan.forecast import RunForecast
from batchscape.plan.forecast_text import COUNTS, memory_text, span
from batchscape.plan.machine import Machine
from batchscape.predictor import predict
from batchscape.probe import ADVICE, CUT, group_of, known_bounds, plan_cuts, solve_batch
from batchscape.record.spec import RunSpec, plain_geometry
from batchscape.text import DURATIONS, list_text, near_multiples

Step = dict[str, str]
"""One decision: its name, value, reason and basis: predicted, measured, given or computed."""


@dataclass(frozen=True)
class Cut:
    """One micro-batch that the devices could take."""

    spec: RunSpec
    fits: bool | None
    """None: not known."""
    basis: str
    """`measured` or `predicted`."""
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
    chosen_names = {f"batch.{name}" for name in (*CUT, "ramp")}
    if chosen_keys := [key for key in keys if key in chosen_names or key.startswith("batch.ramp.")]:
        raise ConfigError(
            f"a recipe chooses the cut of batch.global_batch_size by itself; given "
            f"{', '.join(chosen_keys)}; leave that out, or give --devices N"
        )
    settings = set_values(grid.cells[0].settings, {"batch.ramp": []})
    batch_size = solve_batch(settings, *CUT[:3]).global_batch_size
    config = RunConfig.from_mapping(settings)
    if isinstance(config.engine, Command):
        raise ConfigError(
            "only a program of engine=command itself knows its memory, so that no cut can be "
            "recommended before it ran; sweep some cuts, and recommend from their folder"
        )
    count = machine.devices(machine.device_type(config.launcher))
    limit = count if devices is None else devices
    if not 1 <= limit <= count:
        raise ConfigError(
            f"devices must be from 1 to the {count} of this machine; given {limit}. For a machine "
            "that is not this one: cluster=NAME cluster.devices_per_node=N cluster.nodes=N"
        )
    # As many devices as divide the batch, on as few nodes as hold them.
    counts = ((ranks, -(-ranks * machine.nodes // count)) for ranks in range(limit, 0, -1))
    ranks, nodes = next((r, n) for r, n in counts if batch_size % r == 0 and r % n == 0)
    geometries = enumerate_geometries(batch_size, data_parallel_sizes=[ranks], nodes=nodes)
    fixed = {key: value for key, value in grid.fixed.items() if not key.startswith("batch.global")}
    one_grid = replace(grid, cells=[Cell(settings, {})], fixed=fixed)
    cuts = _cuts(one_grid, geometries, machine, runs)
    own_words = [word for word in words if group_of(word) not in {"batch", "cluster"}]
    own_words += [f"batch.global_batch_size={batch_size}", f"batch.data_parallel_size={ranks}"]
    return _answer(cuts, own_words, machine, limit)


def _answer(cuts: Sequence[Cut], words: Sequence[str], machine: Machine, limit: int) -> Recipe:
    """Choose a cut; `words` are the settings that all cuts share, `limit` is that of devices."""
    chosen, why_not = _choose(cuts)
    geometry, spec = (chosen or cuts[0]).geometry, cuts[0].spec
    count, is_on_cpu = machine.devices(spec.device_type), spec.device_type == "cpu"
    may_fit = [cut.geometry.micro_batch_size for cut in cuts if cut.fits is None]
    cut_words = [
        f"batch.micro_batch_size={geometry.micro_batch_size}",
        f"batch.gradient_accumulation_steps={geometry.gradient_accumulation_steps}",
    ]
    has_one_node = geometry.nodes == 1  # runs are launched on one node
    # The probe runs out of memory on purpose, which is safe on a CPU only with a limit.
    is_safe = not is_on_cpu or spec.config.device.memory_limit_gib is not None
    run = shlex.join(["batchscape", "run", *words, *cut_words])
    probe = shlex.join(["batchscape", "probe", *words])
    content: dict[str, Any] = {
        "global_batch_size": geometry.global_batch_size,
        "hardware": f"{count} cores of {machine.cpu_name}"
        if is_on_cpu
        else f"{count} x {machine.cuda_devices[0].name}",
        "geometry": chosen and plain_geometry(geometry),
        "why_not": why_not,
        "steps": _steps(chosen, count, limit, is_largest=chosen is cuts[-1]) if chosen else [],
        "config": config_values(geometry) if chosen else {},
        "command": run if chosen and has_one_node else None,
        "probe_command": probe if is_safe and has_one_node else None,
        "to_try": [micro for micro in may_fit if not chosen or micro >= geometry.micro_batch_size],
        "cuts": [
            plain_geometry(cut.geometry)
            | {"fits": cut.fits, "basis": cut.basis, "forecast": asdict(cut.forecast)}
            for cut in cuts
        ],
    }
    return Recipe(chosen, content)


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
        advice = (
            "`batchscape probe` tells on one machine, on a CPU with a device.memory_limit_gib"
            if probe is None
            else "the machine itself tells, and this then says measured"
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


def _cuts(
    grid: SweepCells,
    geometries: Sequence[BatchGeometry],
    machine: Machine,
    runs: Sequence[Path],
) -> list[Cut]:
    """Return cuts with their forecasts, and with what a probe has found out about them."""
    sweep, specs = plan_cuts(grid, geometries, machine)
    forecasts = predict(specs, sweep, machine, runs).runs
    fitting, failing = 0, math.inf
    if not machine.is_declared:
        fitting, failing = known_bounds(grid, geometries, machine)
    cuts = []
    for spec in specs:
        forecast, micro = forecasts[spec.run_id], spec.geometry.micro_batch_size
        is_known = not fitting < micro < failing
        verdict = None if forecast.memory is None else forecast.memory.fits
        predicted = {"fits": True, "does not fit": False}.get(str(verdict))
        fits = micro <= fitting if is_known else predicted
        cuts.append(Cut(spec, fits, "measured" if is_known else "predicted", forecast))
    return cuts


def _choose(cuts: Sequence[Cut]) -> tuple[Cut | None, str | None]:
    """Return the largest cut that fits, else the smallest that may, else why there is none."""
    if fitting := [cut for cut in cuts if cut.fits]:
        return fitting[-1], None
    uncertain_cut = next((cut for cut in cuts if cut.fits is None), None)
    if uncertain_cut is None:
        micro = cuts[0].geometry.micro_batch_size
        return None, f"not even micro-batch {micro} fits a device. {ADVICE}"
    memory = uncertain_cut.forecast.memory
    if memory is None or memory.peak_allocated_gib is None:
        return None, f"memory is {'' if memory is None else memory.way}."
    if memory.room_gib is None:
        return None, "the memory of the device is not known; give device.memory_limit_gib."
    return uncertain_cut, None


def _steps(chosen: Cut, device_count: int, limit: int, *, is_largest: bool) -> list[Step]:
    """Return the decisions behind a cut, in their order, and what it will take."""
    geometry, forecast, memory = chosen.geometry, chosen.forecast, chosen.forecast.memory
    batch_size, ranks = geometry.global_batch_size, geometry.data_parallel_size
    why_micro_batch = "the largest there is" if is_largest else "the largest that fits"
    if chosen.fits is None:
        why_micro_batch = "may fit; none does surely"
    if memory is not None and memory.room_gib is not None and (taken := memory_text(memory)):
        why_micro_batch += f": tensors take {taken} of {memory.room_gib:.3g} GiB"
    if ranks == limit:
        why_ranks = (
            "all there are" if limit == device_count else f"as many as asked, of {device_count}"
        )
    elif batch_size % limit == 0:
        why_ranks = f"of {limit}, which cannot be spread evenly over nodes"
    else:
        near = near_multiples(batch_size, limit)
        why_ranks = (
            f"of {limit}, which do not divide {batch_size}; a global batch of {near} has none idle"
        )
    micro = geometry.micro_batch_size
    product = f"{batch_size} / ({ranks} x {micro})"
    rows: list[tuple[str, object, str, str]] = [
        ("micro-batch", micro, why_micro_batch, chosen.basis),
        ("devices", ranks, why_ranks, "given"),
        ("accumulation", geometry.gradient_accumulation_steps, product, "computed"),
        ("learning rate", *_learning_rate(chosen.spec)),
    ]
    if forecast.step_time_s is None:
        rows.append(("step time", "", forecast.way, "predicted"))
    else:
        rate = span(forecast.tokens_per_s or forecast.samples_per_s, COUNTS)
        kind = "tokens/s" if forecast.tokens_per_s else "samples/s"
        step, run = (span(time, DURATIONS) for time in (forecast.step_time_s, forecast.run_time_s))
        hours = f"{span(forecast.device_hours, {'': 1.0})} device-hours"
        rows += [
            ("step time", step, f"{rate} {kind}; by {forecast.way}", "predicted"),
            ("run time", run, hours, "predicted"),
        ]
    return [
        {"name": name, "value": str(value), "reason": reason, "basis": basis}
        for name, value, reason, basis in rows
    ]


def _learning_rate(spec: RunSpec) -> tuple[str, str, str]:
    """Return the optimizer's learning rate for this global batch, the rule, and its basis."""
    rate, scaling = f"{spec.stages[-1].optimizer.learning_rate:.4g}", spec.config.scaling
    reference = scaling.reference_global_batch_size
    if reference is None or scaling.learning_rate == "none":
        return (
            rate,
            "as it is set; scaling=sqrt or linear with its reference batch rescales it",
            "given",
        )
    ratio = f"{spec.geometry.global_batch_size} / {reference}"
    factor = f"sqrt({ratio})" if scaling.learning_rate == "sqrt" else ratio
    return rate, f"{spec.config.optimizer.learning_rate:.4g} x {factor}", "computed"
