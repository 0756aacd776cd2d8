"""What really runs: who reads which value, which one wins, and the geometry that follows."""

from __future__ import annotations

from dataclasses import dataclass

from batchscape.errors import GeometryError
from batchscape.geometry import BatchGeometry, solve
from batchscape.interop.gather import Setup
from batchscape.interop.statements import Statement, Value

__all__ = ["AccelerateMode", "Fact", "Running", "accelerate_mode", "first_fact", "resolve"]


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

    system: str
    """Whose rules decide."""
    devices: Fact | None
    micro: Fact | None
    accumulation: Fact | None
    total: Fact | None
    """Samples per optimizer step that a file asks for."""
    geometry: BatchGeometry | None
    refusal: GeometryError | None = None
    """The rule that the numbers break, with the nearest that would not."""


def resolve(setup: Setup) -> Running:
    """Say what runs: of three numbers the fourth follows, and all four may refuse each other."""
    system = _system(setup)
    devices = _devices(setup)
    micro, accumulation, total = _parts(system, setup, devices)
    facts = {
        "data_parallel_size": devices,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "global_batch_size": total,
    }
    numbers = {name: fact.value for name, fact in facts.items() if fact is not None}
    nodes = first_fact("nodes", setup.launcher, setup.accelerate, *setup.programs)
    if nodes is not None and devices is not None and devices.value % nodes.value == 0:
        numbers["nodes"] = nodes.value
    geometry = refusal = None
    try:
        if sum(fact is not None for fact in facts.values()) >= 3:
            geometry = solve(**numbers)
    except GeometryError as error:
        refusal = error
    return Running(system, devices, micro, accumulation, total, geometry, refusal)


def first_fact(name: str, *statements: Statement | None) -> Fact | None:
    """Return the first number that is stated, in the order of precedence."""
    for statement in statements:
        value = getattr(statement, name, None)
        if statement is not None and isinstance(value, Value) and value.value is not None:
            return Fact(value.value, statement.name(value))
    return None


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


def _system(setup: Setup) -> str:
    kind = setup.program.kind if setup.program is not None else "script"
    if setup.trainer is not None:
        return "trainer"
    if kind != "script":
        return kind
    if setup.launched_by == "accelerate":
        return "accelerate"
    return "deepspeed" if setup.deepspeed is not None else "script"


def _devices(setup: Setup) -> Fact | None:
    fact: Fact | None = None
    launcher = setup.launched_by
    if setup.launcher is not None and setup.launcher.on("uncounted"):
        pass
    elif launcher == "accelerate":
        fact = first_fact("devices", *setup.of_accelerate)
        mode = accelerate_mode(setup)
        if not mode.starts_many and (fact is None or fact.value > 1):
            fact = Fact(1, mode.reason)
    elif launcher in {None, "litgpt"}:
        # LitGPT counts those of one node; file and command may each give one of the two.
        fact, nodes = (first_fact(name, *setup.programs) for name in ("devices", "nodes"))
        if fact is not None and nodes is not None:
            fact = Fact(fact.value * nodes.value, f"{fact.origin}, {nodes.origin}")
    else:
        fact = first_fact("devices", setup.launcher)
    if fact is None and setup.devices is not None:
        fact = Fact(setup.devices, "--devices")
    return fact


Parts = tuple[Fact | None, Fact | None, Fact | None]
"""Micro-batch, accumulation and samples per optimizer step."""


def _parts(system: str, setup: Setup, devices: Fact | None) -> Parts:
    if system == "accelerate":
        return _of_accelerate(setup)
    # The Trainer does its accumulation itself, whatever a DeepSpeed JSON says.
    places = (setup.deepspeed,) if system == "deepspeed" else setup.programs
    micro, accumulation, total = (
        first_fact(name, *places) for name in ("micro", "accumulation", "total")
    )
    trainer = setup.trainer
    if micro is not None and trainer is not None and trainer.on("split_batches"):
        # The batch of the arguments is then cut over the devices; a remainder is refused.
        if devices is None or micro.value % devices.value:
            micro = None
        else:
            micro = Fact(micro.value // devices.value, f"{micro.origin}, split over devices")
    return micro, accumulation, total


def _of_accelerate(setup: Setup) -> Parts:
    """Return what `Accelerator` takes: the launcher's accumulation goes before the script's."""
    json, program = setup.deepspeed, setup.program
    # The total of a DeepSpeed JSON is held against the product; it decides nothing.
    micro, total = first_fact("micro", program, json), first_fact("total", program)
    if json is not None and json.accumulation is None:
        origin = f"{json.source}: no gradient_accumulation_steps, so accelerate says 1"
        return micro, Fact(1, origin), total
    launched = setup.of_accelerate if accelerate_mode(setup).deepspeed else ()
    return micro, first_fact("accumulation", json, *launched, program), total
