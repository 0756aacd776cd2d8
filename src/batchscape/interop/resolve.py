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
from batchscape.interop.command import COMMAND_LINE, Launch, read_script
from batchscape.interop.readers import (
    KINDS,
    Source,
    SourceKind,
    Statement,
    Value,
    is_configuration,
    read_deepspeed,
    read_file,
    read_text,
)
from batchscape.text import list_text

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Setup:
    """The statements of all files and of the command; None where there is no such source."""

    launch: Launch | None = None
    launcher: Statement | None = None
    programs: tuple[Statement, ...] = ()
    """Arguments of the script and its file, in the order of precedence."""
    unread: Statement | None = None
    """A file of the script that the command does not name."""
    deepspeed: Statement | None = None
    accelerate: Statement | None = None
    devices: int | None = None
    """The option --devices, for a number that only the machine knows."""

    @property
    def launched_by(self) -> str | None:
        """Name of the launcher; an accelerate config alone is for `accelerate launch`."""
        if self.launcher is None:
            return "accelerate" if self.accelerate is not None else None
        return str(self.launcher.others["launcher"])

    @property
    def of_accelerate(self) -> tuple[Statement, ...]:
        """Where `accelerate launch` finds its settings, in the order of precedence."""
        return tuple(s for s in (self.launcher, self.accelerate) if s is not None)

    @property
    def program(self) -> Statement | None:
        """Arguments or file of the script, which cut the batch; None where there are none."""
        return self.programs[0] if self.programs else None

    @property
    def trainer(self) -> Statement | None:
        """The program, where it is transformers' Trainer."""
        program = self.program
        is_trainer = program is not None and program.kind in {"trainer", "axolotl"}
        return program if is_trainer else None

    @property
    def statements(self) -> tuple[Statement, ...]:
        """All statements, in the order in which a table shows them."""
        sources = (self.launcher, self.accelerate, *self.programs, self.unread, self.deepspeed)
        return tuple(statement for statement in sources if statement is not None)


def gather(
    files: Sequence[Path],
    command: Sequence[str],
    devices: int | None,
    flags: Mapping[str, str],
) -> Setup:
    """Read files and a command, and the files that they name; two of one kind are refused."""
    scripts = [path for path in files if not is_configuration(path)]
    if len(scripts) + bool(command) > 1:
        msg = "one launch command at a time: one script, or the command after --"
        raise ConfigError(msg)
    launch = None
    if scripts:
        text = read_text(scripts[0])
        launch = read_script(str(scripts[0]), text, flags, has_device_count=devices is not None)
    elif command:
        # The shell has split and expanded it; a variable in front may hold blanks.
        heads = [word.partition("=") for word in takewhile(_ASSIGNMENT.match, command)]
        variables = (f"{name}={shlex.quote(value)}" for name, _, value in heads)
        text = " ".join((*variables, shlex.join(command[len(heads) :])))
        launch = read_script(COMMAND_LINE, text, flags, has_device_count=devices is not None)
    elif flags:
        msg = "--flag names arguments of a script: give its launch command, or the file with it"
        raise ConfigError(msg)
    configurations = _Files([path for path in files if is_configuration(path)])
    base = scripts[0].parent if scripts else Path()
    for name, kind in launch.files if launch is not None else ():
        configurations.read_reference(name, kind, base)
    configurations.read_pending()

    statements = configurations.statements
    arguments, file = None if launch is None else launch.script, statements.get("program")
    is_litgpt = arguments is not None and arguments.kind == "litgpt"
    states_batch = arguments is not None and arguments.states_batch
    unread = file if states_batch and not is_litgpt else None
    order = (arguments, file) if is_litgpt or states_batch else (file, arguments)
    programs = tuple(one for one in order if one is not None and one is not unread)
    for statement in (*programs, statements.get("accelerate")):
        configurations.read_deepspeed_of(statement)
    return Setup(
        launch=launch,
        launcher=launch.statement if launch is not None else None,
        programs=programs,
        unread=unread,
        deepspeed=statements.get("deepspeed"),
        accelerate=statements.get("accelerate"),
        devices=devices,
    )


class _Files:
    """Statements of files by their role; each file is read once."""

    def __init__(self, arguments: Sequence[Path]) -> None:
        self.pending = list(arguments)
        """Files of the command line that are not read yet."""
        self.statements: dict[str, Statement] = {}
        self.paths: dict[str, Path] = {}

    def read_reference(self, name: str, kind: SourceKind | None, base: Path) -> None:
        """Read a file that a command or another file names."""
        same_name = [path for path in self.pending if path.name == Path(name).name]
        places = (*same_name, Path(name), base / name)
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            msg = (
                f"{name} is named as a configuration, and is neither here nor beside the file that "
                "names it; give it too: batchscape check-config FILE FILE"
            )
            raise ConfigError(msg)
        if path in self.pending:
            self.pending.remove(path)
        self._read(path, kind)

    def read_pending(self) -> None:
        """Read the files that nothing names."""
        while self.pending:
            self._read(self.pending.pop(0), None)

    def read_deepspeed_of(self, statement: Statement | None) -> None:
        """Read the DeepSpeed JSON that a configuration names or holds."""
        if statement is None:
            return
        reference = statement.others.get("deepspeed") or statement.others.get(
            "deepspeed_config_file"
        )
        if isinstance(reference, dict):
            source = Source(f"{statement.source}: deepspeed", reference)
            self._keep(read_deepspeed(source), Path(statement.source))
        elif isinstance(reference, str) and reference.endswith(".json"):
            path = self.paths.get("deepspeed")
            if path is None or path.name != Path(reference).name:
                base = self.paths.get(_role(statement), Path())
                self.read_reference(reference, "deepspeed", base.parent)

    def _read(self, path: Path, kind: SourceKind | None) -> None:
        if all(path.resolve() != other.resolve() for other in self.paths.values()):
            self._keep(read_file(path, kind), path)

    def _keep(self, statement: Statement, path: Path) -> None:
        first_statement = self.statements.get(_role(statement))
        if first_statement is not None:
            pair = (first_statement, statement)
            names = list_text((f"{each.source} ({KINDS[each.kind]})" for each in pair), "and")
            msg = (
                f"{names} both set the batch, and a program reads one of them; check them in two "
                "commands"
            )
            raise ConfigError(msg)
        self.statements[_role(statement)] = statement
        self.paths[_role(statement)] = path


def _role(statement: Statement) -> str:
    """Return the role of a file, of which there is one each."""
    return statement.kind if statement.kind in {"deepspeed", "accelerate"} else "program"


@dataclass(frozen=True)
class Fact:
    """A number in force, and where it comes from."""

    value: int
    origin: str

    def __str__(self) -> str:
        return f"{self.value} ({self.origin})"


@dataclass(frozen=True)
class AccelerateMode:
    """How `accelerate launch` starts the script by its flags and its file."""

    starts_many: bool
    """Whether it starts more than one process at all."""
    deepspeed: bool
    is_certain: bool
    """False where it depends on the devices of the machine."""
    reason: str
    """Why only one process is started."""


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
    kind = setup.program.kind if setup.program is not None else "script"
    if setup.trainer is not None:
        system = "trainer"
    elif kind != "script":
        system = kind
    elif setup.launched_by == "accelerate":
        system = "accelerate"
    else:
        system = "deepspeed" if setup.deepspeed is not None else "script"
    devices = _devices(setup)
    micro, accumulation, total = _numbers_of(system, setup, devices)
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
        if len(numbers.keys() & facts.keys()) >= 3:
            geometry = solve(**numbers)
    except GeometryError as error:
        refusal = error
    return Running(system, devices, micro, accumulation, total, geometry, refusal)


def first_fact(name: str, *statements: Statement | None) -> Fact | None:
    """Return the first number that is stated, in the order of precedence."""
    for statement in statements:
        value = getattr(statement, name, None)
        if statement is not None and isinstance(value, Value) and value.value is not None:
            return Fact(value.value, statement.quote(value))
    return None


def accelerate_mode(setup: Setup) -> AccelerateMode:
    """Return how `accelerate launch` would start the script (accelerate 1.15)."""
    launcher, config = setup.launcher, setup.accelerate
    command = launcher if launcher is not None and setup.launched_by == "accelerate" else None
    kind = config.others["distributed_type"] if config is not None else None
    launch_switches = {
        name
        for name in ("multi_gpu", "tpu", "use_deepspeed", "use_fsdp")
        if command is not None and command.is_on(name)
    }
    by_mpirun = any(statement.is_on("mpirun") for statement in setup.of_accelerate)
    if command is not None and command.is_on("cpu"):
        reason = "--cpu starts the script once, whatever num_processes says"
        return AccelerateMode(by_mpirun, False, True, reason)
    deepspeed = "use_deepspeed" in launch_switches or (not launch_switches and kind == "DEEPSPEED")
    if launch_switches or deepspeed or kind in {"FSDP", "XLA"} or str(kind).startswith("MULTI_"):
        if launch_switches or kind != "MULTI_CPU":
            return AccelerateMode(True, deepspeed, True, "")
        reason = "distributed_type MULTI_CPU starts the script once unless mpirun_config is set"
        return AccelerateMode(by_mpirun, False, True, reason)
    if config is not None:
        reason = f"distributed_type {kind} starts the script once, whatever num_processes says"
        return AccelerateMode(by_mpirun, False, True, reason)
    reason = "without --multi_gpu, several processes start only where it finds several GPUs"
    return AccelerateMode(True, False, False, reason)


def _devices(setup: Setup) -> Fact | None:
    fact: Fact | None = None
    if setup.launcher is not None and setup.launcher.is_on("uncounted"):
        pass
    elif setup.launched_by == "accelerate":
        fact = first_fact("devices", *setup.of_accelerate)
        mode = accelerate_mode(setup)
        if not mode.starts_many and (fact is None or fact.value > 1):
            fact = Fact(1, mode.reason)
    elif setup.launched_by in {None, "litgpt"}:
        # LitGPT counts those of one node; file and command may each give one of the two.
        fact, nodes = (first_fact(name, *setup.programs) for name in ("devices", "nodes"))
        if fact is not None and nodes is not None:
            fact = Fact(fact.value * nodes.value, f"{fact.origin}, {nodes.origin}")
    else:
        fact = first_fact("devices", setup.launcher)
    if fact is None and setup.devices is not None:
        fact = Fact(setup.devices, "--devices")
    return fact


BatchNumbers = tuple[Fact | None, Fact | None, Fact | None]
"""Micro-batch, accumulation and samples per optimizer step."""


def _numbers_of(system: str, setup: Setup, devices: Fact | None) -> BatchNumbers:
    if system == "accelerate":
        return _accelerate_numbers(setup)
    # The Trainer does its accumulation itself, whatever a DeepSpeed JSON says.
    places = (setup.deepspeed,) if system == "deepspeed" else setup.programs
    micro, accumulation, total = (
        first_fact(name, *places) for name in ("micro", "accumulation", "total")
    )
    trainer = setup.trainer
    if micro is not None and trainer is not None and trainer.is_on("split_batches"):
        # The batch of the arguments is then cut over the devices; a remainder is refused.
        if devices is None or micro.value % devices.value:
            micro = None
        else:
            micro = Fact(micro.value // devices.value, f"{micro.origin}, split over devices")
    return micro, accumulation, total


def _accelerate_numbers(setup: Setup) -> BatchNumbers:
    """Return the numbers of `Accelerator`: the launcher's accumulation overrides the script's."""
    json, program = setup.deepspeed, setup.program
    # The total of a DeepSpeed JSON is compared with the product, and decides nothing.
    micro, total = first_fact("micro", program, json), first_fact("total", program)
    if json is not None and json.accumulation is None:
        origin = f"{json.source}: no gradient_accumulation_steps, so accelerate says 1"
        return micro, Fact(1, origin), total
    launched = setup.of_accelerate if accelerate_mode(setup).deepspeed else ()
    return micro, first_fact("accumulation", json, *launched, program), total
