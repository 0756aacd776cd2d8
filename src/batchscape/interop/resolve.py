"""What really runs: who reads which value, which one wins, and the geometry that follows."""

from __future__ import annotations

from dataclasses import dataclass

from batchscape.errors import GeometryError
from batchscape.geometry import BatchGeometry, solve
from batchscape.interop.gather import Setup
from batchscape.interop.statements import Statement, Value

__all__ = ["AccelerateMode", "Fact", "Running", "accelerate_mode", "resolve"]


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
        fact = _first((setup.launcher, "devices"), (setup.accelerate, "devices"))
        mode = accelerate_mode(setup)
        if not mode.starts_many and (fact is None or fact.value > 1):
            fact = Fact(1, mode.reason)
    elif launcher in {None, "litgpt"}:
        # LitGPT counts those of one node; file and command may each give one of the two.
        fact, nodes = (_of_programs(setup, name) for name in ("devices", "nodes"))
        if fact is not None and nodes is not None:
            fact = Fact(fact.value * nodes.value, f"{fact.origin}, {nodes.origin}")
    else:
        fact = _first((setup.launcher, "devices"))
    if fact is None and setup.devices is not None:
        fact = Fact(setup.devices, "--devices")
    return fact


def _nodes(setup: Setup) -> int | None:
    fact = _first((setup.launcher, "nodes"), (setup.accelerate, "nodes"))
    fact = fact or _of_programs(setup, "nodes")
    return None if fact is None else fact.value


def _of_programs(setup: Setup, name: str) -> Fact | None:
    return _first(*((statement, name) for statement in setup.programs))


def _first(*places: tuple[Statement | None, str]) -> Fact | None:
    """Return the first number that is given, in the order of precedence."""
    for statement, name in places:
        value = getattr(statement, name, None)
        if statement is not None and isinstance(value, Value) and value.value is not None:
            return Fact(value.value, statement.name(value))
    return None


Parts = tuple[Fact | None, Fact | None, Fact | None]
"""Micro-batch, accumulation and samples per optimizer step."""


def _parts(system: str, setup: Setup, devices: Fact | None) -> Parts:
    if system == "accelerate":
        return _of_accelerate(setup)
    # The Trainer does its accumulation itself, whatever a DeepSpeed JSON says.
    places = (setup.deepspeed,) if system == "deepspeed" else setup.programs
    micro, accumulation, total = (
        _first(*((place, name) for place in places)) for name in ("micro", "accumulation", "total")
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
    micro = _first((setup.program, "micro"), (setup.deepspeed, "micro"))
    # That of a DeepSpeed JSON is held against the product; it decides nothing.
    total = _first((setup.program, "total"))
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
    return micro, _first(*launched, (setup.program, "accumulation")), total
