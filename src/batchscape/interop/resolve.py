"""What really runs: who reads which value, which one wins, and the geometry that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchscape.errors import GeometryError
from batchscape.geometry import BatchGeometry, solve
from batchscape.interop.gather import Setup
from batchscape.interop.statements import Statement, Value

__all__ = ["AccelerateMode", "Fact", "Running", "accelerate_mode", "resolve"]

System = Literal["trainer", "accelerate", "deepspeed", "litgpt", "script"]

# Of `litgpt pretrain` 0.5; its fine-tuning commands have defaults of their own.
_LITGPT_PRETRAIN = {"micro": 4, "total": 512}


@dataclass(frozen=True)
class Fact:
    """A number in force, and where it comes from."""

    value: int
    origin: str

    def __str__(self) -> str:
        return f"{self.value} ({self.origin})"


@dataclass(frozen=True)
class AccelerateMode:
    """What `accelerate launch` makes of its flags and its file."""

    starts_many: bool
    """Whether it starts more than one process at all."""
    deepspeed: bool
    is_certain: bool
    """False where it depends on the devices of the machine."""
    reason: str
    """Why only one process is started."""


@dataclass(frozen=True)
class Running:
    """What the files and the command amount to; None where they do not tell."""

    system: System
    """Whose rules decide."""
    devices: Fact | None
    micro: Fact | None
    accumulation: Fact | None
    total: Fact | None
    """Samples per optimizer step that a file asks for."""
    geometry: BatchGeometry | None
    unsolved: str = ""
    """The rule that the numbers break; empty where they are too few, or solved."""


def resolve(setup: Setup) -> Running:
    """Say what runs.

    Returns
    -------
    Running
        Of the DeepSpeed library, the numbers before its own check, which is that of `geometry`.
    """
    system = _system(setup)
    devices = _devices(setup)
    micro, accumulation, total = _parts(system, setup, devices)
    given: dict[str, int] = {}
    for name, fact in (
        ("data_parallel_size", devices),
        ("micro_batch_size", micro),
        ("gradient_accumulation_steps", accumulation),
    ):
        if fact is not None:
            given[name] = fact.value
    if total is not None and len(given) < 3:
        given["global_batch_size"] = total.value
    geometry, unsolved = None, ""
    if len(given) >= 3:
        nodes = _nodes(setup)
        if nodes is not None and devices is not None and devices.value % nodes == 0:
            given["nodes"] = nodes
        try:
            geometry = solve(**given)
        except GeometryError as error:
            unsolved = str(error)
    return Running(system, devices, micro, accumulation, total, geometry, unsolved)


def accelerate_mode(setup: Setup) -> AccelerateMode:
    """Return how `accelerate launch` would start the script (accelerate 1.15)."""
    launcher, config = setup.launcher, setup.accelerate
    said = launcher if launcher is not None and setup.launched_by == "accelerate" else None
    kind = config.others["distributed_type"] if config is not None else None
    chosen = {
        name
        for name in ("multi_gpu", "tpu", "use_deepspeed", "use_fsdp")
        if said is not None and said.on(name)
    }
    if said is not None and said.on("cpu"):
        reason = "--cpu starts the script once, whatever num_processes says"
        return AccelerateMode(_mpirun(setup), False, True, reason)
    deepspeed = "use_deepspeed" in chosen or (not chosen and kind == "DEEPSPEED")
    if chosen or deepspeed or kind in {"FSDP", "XLA"} or str(kind).startswith("MULTI_"):
        if chosen or kind != "MULTI_CPU":
            return AccelerateMode(True, deepspeed, True, "")
        reason = "distributed_type MULTI_CPU starts the script once unless mpirun_config is set"
        return AccelerateMode(_mpirun(setup), False, True, reason)
    if config is not None:
        reason = f"distributed_type {kind} starts the script once, whatever num_processes says"
        return AccelerateMode(_mpirun(setup), False, True, reason)
    reason = "without --multi_gpu, several processes start only where it finds several GPUs"
    return AccelerateMode(True, False, False, reason)


def _mpirun(setup: Setup) -> bool:
    return any(statement.on("mpirun") for statement in setup.of_accelerate)


def _system(setup: Setup) -> System:
    if setup.litgpt is not None or setup.litgpt_arguments is not None:
        return "litgpt"
    if setup.trainer is not None:
        return "trainer"
    if setup.launched_by == "accelerate":
        return "accelerate"
    return "deepspeed" if setup.deepspeed is not None else "script"


def _devices(setup: Setup) -> Fact | None:
    found: Fact | None = None
    launcher = setup.launched_by
    if launcher == "accelerate":
        found = _first((setup.launcher, "devices"), (setup.accelerate, "devices"))
        mode = accelerate_mode(setup)
        if not mode.starts_many and (found is None or found.value > 1):
            found = Fact(1, mode.reason)
    elif launcher == "litgpt" or (launcher is None and setup.litgpt is not None):
        found = _litgpt_devices(setup)
    elif launcher is not None:
        found = _first((setup.launcher, "devices"))
    if found is None and setup.devices is not None:
        found = Fact(setup.devices, "--devices")
    return found


def _litgpt_devices(setup: Setup) -> Fact | None:
    """Devices x nodes, where the file and the command may each give one of them."""
    nodes = _first((setup.litgpt_arguments, "nodes"), (setup.litgpt, "nodes"))
    for statement in (setup.litgpt_arguments, setup.litgpt):
        if statement is not None and statement.devices is not None and statement.devices.value:
            own = statement.nodes.value if statement.nodes is not None else 1
            per_node = statement.devices.value // (own or 1)
            return Fact(per_node * (nodes.value if nodes else 1), statement.name(statement.devices))
    return None


def _nodes(setup: Setup) -> int | None:
    found = _first(
        (setup.launcher, "nodes"),
        (setup.accelerate, "nodes"),
        (setup.litgpt_arguments, "nodes"),
        (setup.litgpt, "nodes"),
    )
    return None if found is None else found.value


def _first(*places: tuple[Statement | None, str]) -> Fact | None:
    """Return the first number that is given, in the order of precedence."""
    for statement, name in places:
        if statement is None:
            continue
        value = getattr(statement, name)
        if isinstance(value, Value) and value.value is not None:
            return Fact(value.value, statement.name(value))
    return None


Parts = tuple[Fact | None, Fact | None, Fact | None]
"""Micro-batch, accumulation and samples per optimizer step."""


def _parts(system: System, setup: Setup, devices: Fact | None) -> Parts:
    if system == "trainer":
        return _of_trainer(setup, devices)
    if system == "accelerate":
        return _of_accelerate(setup)
    if system == "litgpt":
        return _of_litgpt(setup, devices)
    statement = setup.deepspeed if system == "deepspeed" else setup.script
    micro, accumulation, total = (
        _first((statement, name)) for name in ("micro", "accumulation", "total")
    )
    if system == "deepspeed" and accumulation is None and (micro is None) != (total is None):
        accumulation = Fact(1, "default of DeepSpeed")
    return micro, accumulation, total


def _of_trainer(setup: Setup, devices: Fact | None) -> Parts:
    """Return the Trainer's own numbers: it does its accumulation itself."""
    micro = _first((setup.trainer, "micro"))
    if micro is not None and setup.trainer is not None and setup.trainer.on("split_batches"):
        # The batch of the arguments is then cut over the devices; a remainder is refused.
        if devices is None or micro.value % devices.value:
            micro = None
        else:
            micro = Fact(micro.value // devices.value, f"{micro.origin}, split over devices")
    return micro, _first((setup.trainer, "accumulation")), None


def _of_accelerate(setup: Setup) -> Parts:
    """Return what `Accelerator` takes: the launcher's accumulation goes before the script's."""
    micro = _first((setup.script, "micro"), (setup.deepspeed, "micro"))
    total = _first((setup.deepspeed, "total"), (setup.script, "total"))
    launched = [(setup.launcher, "accumulation"), (setup.accelerate, "accumulation")]
    if not accelerate_mode(setup).deepspeed:
        launched = []
    if setup.deepspeed is not None:
        stated = setup.deepspeed.accumulation
        if stated is None:
            origin = (
                f"{setup.deepspeed.source}: no gradient_accumulation_steps, so accelerate says 1"
            )
            return micro, Fact(1, origin), total
        launched = [(setup.deepspeed, "accumulation"), *launched]
    accumulation = _first(*launched, (setup.script, "accumulation"))
    return micro, accumulation or Fact(1, "default of Accelerator"), total


def _of_litgpt(setup: Setup, devices: Fact | None) -> Parts:
    """Return LitGPT's floor of a floor where it divides, else no accumulation."""
    both = (setup.litgpt_arguments, setup.litgpt)
    micro, total = (_first(*((s, name) for s in both)) for name in ("micro", "total"))
    arguments = setup.litgpt_arguments
    if arguments is not None and arguments.others.get("subcommand") == "pretrain":
        micro = micro or Fact(_LITGPT_PRETRAIN["micro"], "default of litgpt pretrain")
        total = total or Fact(_LITGPT_PRETRAIN["total"], "default of litgpt pretrain")
    accumulation = None
    if devices and micro and total:
        steps = total.value // devices.value // micro.value
        accumulation = Fact(steps, "global // devices // micro") if steps else None
    return micro, accumulation, total
