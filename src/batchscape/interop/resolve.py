"""The files and the command that are used together, and the batch that would run.

Which program reads which value, which value wins, and the geometry that follows.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from batchscape.errors import ConfigError, GeometryError
from batchscape.geometry import BatchGeometry, solve
from batchscape.interop.launch import COMMAND_LINE, Launch, read_script
from batchscape.interop.sources import (
    KINDS,
    NOTHING,
    Fact,
    Statement,
    first_fact,
    is_configuration,
    read_file,
    read_text,
)
from batchscape.text import list_text


@dataclass(frozen=True)
class Setup:
    """The statements of all files and of the command."""

    launch: Launch
    programs: tuple[Statement, ...]
    """Arguments of the script and its file, in the order of precedence."""
    unread: Statement
    """A file of the script that the command does not name."""
    deepspeed: Statement
    accelerate: Statement
    devices: int | None
    """The option --devices, for a number that only the machine knows."""

    @property
    def launched_by(self) -> str:
        """Name of the launcher; an accelerate config alone is for `accelerate launch`."""
        return self.launch.launcher or ("accelerate" if self.accelerate else "")

    @property
    def of_accelerate(self) -> tuple[Statement, Statement]:
        """Where `accelerate launch` finds its settings, in the order of precedence."""
        return self.launch.statement, self.accelerate

    @property
    def program(self) -> Statement:
        """Arguments or file of the script, which cut the batch."""
        return next(iter(self.programs), NOTHING)

    @property
    def trainer(self) -> Statement:
        """The program, where it is transformers' Trainer."""
        return self.program if self.program.kind in {"trainer", "axolotl"} else NOTHING

    @property
    def statements(self) -> tuple[Statement, ...]:
        """All statements, in the order in which a table shows them."""
        sources = (*self.of_accelerate, *self.programs, self.unread, self.deepspeed)
        return tuple(filter(None, sources))


def gather(
    files: Sequence[Path], command: Sequence[str], devices: int | None, flags: Mapping[str, str]
) -> Setup:
    """Read files and a command, and the files that they name; two of one kind are refused."""
    scripts = [path for path in files if not is_configuration(path)]
    if len(scripts) + bool(command) != 1 and (scripts or flags):
        raise ConfigError(
            "give one launch command (--flag names its arguments): a script, or words after --"
        )
    launch, is_counted = Launch(), devices is not None
    if scripts:
        text = read_text(scripts[0])
        launch = read_script(str(scripts[0]), text, flags, has_device_count=is_counted)
    elif command:
        # The shell has split and expanded it; a variable in front may hold blanks.
        heads = [*takewhile(re.compile(r"[A-Za-z_]\w*=").match, command)]
        variables = (
            f"{name}={shlex.quote(value)}" for name, value in (head.split("=", 1) for head in heads)
        )
        text = " ".join((*variables, shlex.join(command[len(heads) :])))
        launch = read_script(COMMAND_LINE, text, flags, has_device_count=is_counted)
    config_files = _Files([path for path in files if is_configuration(path)])
    for name, kind in launch.files:
        config_files.read_named(name, kind, scripts[0].parent if scripts else Path())
    while config_files.pending:
        config_files.read(config_files.pending[0])

    arguments, file = launch.script, config_files.statements["program"]
    is_litgpt = arguments.kind == "litgpt"
    states_batch = arguments.states("micro", "accumulation", "total")
    unread = file if states_batch and not is_litgpt else NOTHING
    order = (arguments, file) if states_batch or is_litgpt else (file, arguments)
    programs = tuple(one for one in order if one and one is not unread)
    for statement in (*programs, config_files.statements["accelerate"]):
        name = str(statement.others.get("deepspeed"))
        first = config_files.statements["deepspeed"].source
        if name.endswith(".json") and Path(name).name != Path(first).name:
            config_files.read_named(name, "deepspeed", Path(statement.source).parent)
    return Setup(
        launch,
        programs,
        unread,
        config_files.statements["deepspeed"],
        config_files.statements["accelerate"],
        devices,
    )


class _Files:
    """Statements of files by their role; each file is read once."""

    def __init__(self, arguments: Sequence[Path]) -> None:
        self.pending = list(arguments)
        """Files of the command line that are not read yet."""
        self.statements = dict.fromkeys(("deepspeed", "accelerate", "program"), NOTHING)
        self.paths: set[Path] = set()

    def read_named(self, name: str, kind: str, base: Path) -> None:
        """Read a file that a command or another file names."""
        same_name = [path for path in self.pending if path.name == Path(name).name]
        places = (*same_name, Path(name), base / name)
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise ConfigError(
                f"{name} is named as a configuration, and is neither here nor beside the file that "
                "names it; give it too: batchscape check-config FILE FILE"
            )
        self.read(path, kind)

    def read(self, path: Path, kind: str = "") -> None:
        """Read a file, of which there is one in each role."""
        self.pending = [other for other in self.pending if other != path]
        if path.resolve() in self.paths:
            return
        self.paths.add(path.resolve())
        statement = read_file(path, kind)
        role = statement.kind if statement.kind in self.statements else "program"
        if other := self.statements[role]:
            pair = (f"{one.source} ({KINDS[one.kind].title})" for one in (other, statement))
            raise ConfigError(
                f"{list_text(pair, 'and')} both set the batch, and a program reads one of them; "
                "check them in two commands"
            )
        self.statements[role] = statement


@dataclass(frozen=True)
class Running:
    """The batch that would run; None where files and command leave a number open."""

    system: str
    """The program whose rules decide."""
    devices: Fact | None
    micro: Fact | None
    accumulation: Fact | None
    total: Fact | None
    """Samples per optimizer step that a file asks for."""
    geometry: BatchGeometry | None
    refusal: GeometryError | None = None
    """The rule that the numbers break, with the nearest that would not."""


def resolve(setup: Setup) -> Running:
    """Resolve the batch: three numbers determine the fourth, and four may contradict each other."""
    system = "trainer" if setup.trainer else setup.program.kind
    if system in {"", "script"}:
        is_accelerate = setup.launched_by == "accelerate"
        system = "accelerate" if is_accelerate else setup.deepspeed.kind or "script"
    devices = _devices(setup)
    micro, accumulation, total = _numbers_of(system, setup, devices)
    facts = {
        "data_parallel_size": devices,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
        "global_batch_size": total,
    }
    numbers = {name: fact.value for name, fact in facts.items() if fact}
    is_enough = len(numbers) >= 3
    nodes = first_fact("nodes", *setup.of_accelerate, *setup.programs)
    if nodes and devices and devices.value % nodes.value == 0:
        numbers["nodes"] = nodes.value
    geometry = refusal = None
    try:
        geometry = solve(**numbers) if is_enough else None
    except GeometryError as error:
        refusal = error
    return Running(system, devices, micro, accumulation, total, geometry, refusal)


@dataclass(frozen=True)
class AccelerateMode:
    """How `accelerate launch` starts the script by its flags and its file."""

    single: str = ""
    """Why only one process is started; empty where several may be."""
    deepspeed: bool = False
    is_certain: bool = True
    """False where several processes start only on a machine with several GPUs."""


def accelerate_mode(setup: Setup) -> AccelerateMode:
    """Return how `accelerate launch` would start the script (accelerate 1.15)."""
    is_command = setup.launch.launcher == "accelerate"
    switches = setup.launch.statement.others["switches"] if is_command else set()
    if "cpu" in switches:
        return AccelerateMode("--cpu starts the script once, whatever num_processes says")
    if not switches.isdisjoint({"multi_gpu", "tpu", "use_deepspeed", "use_fsdp"}):
        return AccelerateMode(deepspeed="use_deepspeed" in switches)
    if not setup.accelerate:
        return AccelerateMode(is_certain=False)
    kind = setup.accelerate.others["distributed_type"]
    if re.fullmatch("DEEPSPEED|FSDP|XLA|MULTI_(?!CPU).*", kind):
        return AccelerateMode(deepspeed=kind == "DEEPSPEED")
    unless = "unless mpirun_config is set" if kind == "MULTI_CPU" else "whatever num_processes says"
    return AccelerateMode(f"distributed_type {kind} starts the script once, {unless}")


def _devices(setup: Setup) -> Fact | None:
    fact: Fact | None = None
    if setup.launched_by == "accelerate" and setup.launch.is_counted:
        fact = first_fact("devices", *setup.of_accelerate)
        single = accelerate_mode(setup).single
        if single and (not fact or fact.value > 1):
            fact = Fact(1, single)
    elif setup.launched_by in {"", "litgpt"} and setup.launch.is_counted:
        # LitGPT counts those of one node; file and command may each give one of the two.
        fact, nodes = (first_fact(name, *setup.programs) for name in ("devices", "nodes"))
        if fact and nodes:
            fact = Fact(fact.value * nodes.value, f"{fact.origin}, {nodes.origin}")
    else:
        fact = first_fact("devices", setup.launch.statement)
    return fact or (Fact(setup.devices, "--devices") if setup.devices else None)


BatchNumbers = tuple[Fact | None, Fact | None, Fact | None]
"""Micro-batch, accumulation and samples per optimizer step."""


def _numbers_of(system: str, setup: Setup, devices: Fact | None) -> BatchNumbers:
    json, program = setup.deepspeed, setup.program
    if system == "accelerate":
        # The total of a DeepSpeed JSON is compared with the product, and decides nothing.
        micro, total = first_fact("micro", program, json), first_fact("total", program)
        if json and not json.states("accumulation"):
            origin = f"{json.source}: no gradient_accumulation_steps, so accelerate says 1"
            return micro, Fact(1, origin), total
        # The launcher's accumulation overrides the script's.
        launched = setup.of_accelerate if accelerate_mode(setup).deepspeed else ()
        return micro, first_fact("accumulation", json, *launched, program), total
    # The Trainer does its accumulation itself, whatever a DeepSpeed JSON says.
    places = (json,) if system == "deepspeed" else setup.programs
    names = ("micro", "accumulation", "total")
    micro, accumulation, total = (first_fact(name, *places) for name in names)
    if micro and setup.trainer and setup.trainer.others["split_batches"]:
        # The batch of the arguments is then cut over the devices; a remainder is refused.
        is_even = devices and micro.value % devices.value == 0
        key = f"{micro.origin}, split over devices"
        micro = Fact(micro.value // devices.value, key) if devices and is_even else None
    return micro, accumulation, total
