"""A launch command: the processes of its launcher, and the arguments of the script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import PurePath

from batchscape.errors import ConfigError
from batchscape.interop.shell import ShellCommand, commands_of, is_unknown
from batchscape.interop.slurm import Job, options_of_step, read_job, with_options
from batchscape.interop.sources import (
    FLAG_WORDS,
    KINDS,
    NOTHING,
    Fact,
    Source,
    Statement,
    count_of_ids,
    facts_of,
    is_configuration,
    is_of_batch,
    is_parallelism,
    read_program,
    refuse_parallelism,
)
from batchscape.text import list_text

SWITCHES: Mapping[str, str] = {
    "torchrun": "h help m module no_python run_path standalone use_env virtual_local_rank",
    "accelerate": "cpu debug downcast_bf16 dynamo_use_dynamic dynamo_use_fullgraph "
    "dynamo_use_regional_compilation enable_cpu_affinity fp8_use_autocast_during_eval h help "
    "m module multi_gpu no_python no_tpu_cluster q quiet same_network tpu tpu_cluster "
    "tpu_use_sudo use_deepspeed use_fsdp use_megatron_lm use_parallelism_config",
    "deepspeed": "bind_cores_to_rank elastic_training force_multi h help module no_local_rank "
    "no_python no_ssh no_ssh_check q quiet save_pid",
    "litgpt": "",
    "python": "",
}
"""Options of each launcher without a value, needed to find where its options end."""

_PYTHON = r"python[\d.]*\n(?:-(?![mc]?\n)\S*\n)*"
_LAUNCHER = re.compile(
    rf"""
    ^(?:\S*/)?(?:
    (?P<torchrun>torchrun | {_PYTHON}-m\ntorch\.distributed\.(?:run|launch))
    | (?P<accelerate>accelerate\nlaunch | accelerate-launch
      | {_PYTHON}-m\naccelerate\.commands\.launch)
    | (?P<deepspeed>deepspeed | {_PYTHON}-m\ndeepspeed\.launcher\.runner)
    | (?P<litgpt>litgpt | {_PYTHON}-m\nlitgpt)
    | (?P<python>{_PYTHON}(?:-m(?=\n.) | (?=\S+\.py\n)))
    )(?:\n|(?<=\n))
    """,
    re.VERBOSE | re.MULTILINE,
)
"""In a command with each word on a line; it ends where the options of the launcher begin."""
_NOT_LAUNCHING = re.compile(
    r"(?:echo|printf|pip3?|which|type|command|cd|mkdir|module|source|\.|(?:conda|mamba)(?!\nrun))\n"
)
_STARTERS = frozenset({"srun", "mpirun", "mpiexec", "horovodrun"})
"""Programs that start a command in several tasks."""
_COUNTS = frozenset(
    {
        *("nnodes", "nproc_per_node", "num_processes", "num_machines", "num_gpus", "num_nodes"),
        *("include", "devices"),
    }
)
"""Options of launchers that say how many processes start."""
_FILES = {
    "config_file": "accelerate",
    "deepspeed_config_file": "deepspeed",
    "deepspeed": "deepspeed",
    "deepspeed_config": "deepspeed",
    "config": "litgpt",
}
"""Options that name a configuration, and its kind."""
COMMAND_LINE = "command line"
"""Name of a command of the command line, and not of a script."""
_ADVICE = "give the command with its values after --"


@dataclass(frozen=True)
class Launch:
    """One launch command, read; false where there is none."""

    name: str = ""
    """The script file and line, or `command line`."""
    launcher: str = ""
    """One of `SWITCHES`."""
    statement: Statement = NOTHING
    """Of the launcher."""
    script: Statement = NOTHING
    """Of the arguments behind the script, where they concern the batch."""
    files: Sequence[tuple[str, str]] = ()
    """Configuration files that the command names, and their kinds; without one their keys tell."""
    floors: Sequence[str] = ()
    """Divisions of the script that leave a remainder."""
    visible: int | None = None
    """Devices that CUDA_VISIBLE_DEVICES names."""
    is_counted: bool = True
    """False where only running it would tell how many processes start."""
    job: Job = field(default_factory=Job)
    task_starter: str = ""
    """The program that starts it in each task, as srun."""
    length: str = ""
    """The argument of the script that gives the length of a sequence."""

    def __bool__(self) -> bool:
        return bool(self.launcher)


def read_flags(texts: Sequence[str]) -> dict[str, str]:
    """Return the arguments of the user's own script by the words that they stand for."""
    flags: dict[str, str] = {}
    for text in texts:
        name, _, word = text.partition("=")
        name = _option_name(name)
        if not name or word not in FLAG_WORDS or word in flags or name in flags.values():
            raise ConfigError(
                f"--flag is NAME=WORD, an argument of your script and one of "
                f"{', '.join(FLAG_WORDS)}, as in batch-size=micro_batch_size, and no NAME and no "
                f"WORD may come twice; given {text!r}"
            )
        flags[word] = name
    in_tokens = {"global_batch_tokens", "sequence_length"} & flags.keys()
    if len(in_tokens) == 1 or (in_tokens and "global_batch_size" in flags):
        raise ConfigError(
            "--flag takes global_batch_tokens and sequence_length together, in place of "
            f"global_batch_size, which counts samples; given {', '.join(texts)}"
        )
    return flags


def read_script(
    name: str, text: str, flags: Mapping[str, str], *, has_device_count: bool = False
) -> Launch:
    """Read the only launch command of a shell script.

    With `has_device_count` the user states the number of processes, so that the command need not.
    """
    job = read_job(name, text)
    # Slurm sets more variables than its lines tell.
    unknown = "SLURM_" if re.search("^#SBATCH ", text, re.MULTILINE) else "(?!)"
    launches = [
        (command, launcher)
        for command in commands_of(name, text, job.variables, unknown=unknown)
        if (launcher := _launcher_of(command.words))
    ]
    # Plain Python in such a script mostly prepares the data.
    is_launch = [launcher.program != "python" or launcher.task_starter for _, launcher in launches]
    launches = [*compress(launches, is_launch)] or launches
    if len(launches) != 1:
        lines = ", ".join(str(command.line) for command, _ in launches)
        raise ConfigError(
            f"{name}: {len(launches) or 'no'} launch commands{f' (lines {lines})' * bool(lines)}, "
            "and one is read (torchrun, accelerate launch, deepspeed, litgpt, python); "
            "batchscape check-config -- COMMAND takes it alone, and a configuration file is named "
            ".json, .yaml or .yml"
        )
    ((command, launcher),) = launches
    where = name if name == COMMAND_LINE else f"{name}:{command.line}"
    return _read_launch(
        where, command, launcher, job, flags=flags, has_device_count=has_device_count
    )


@dataclass(frozen=True)
class _Launcher:
    """The launcher of a command, with the words around it."""

    program: str
    task_starter: str
    """The program before it that starts it in several tasks."""
    task_options: Sequence[str]
    words: Sequence[str]
    """Its own options, the script and its arguments."""


def _launcher_of(words: Sequence[str]) -> _Launcher | None:
    """Return the launcher of a command; None where it has none.

    Skipped in front of it are srun, nohup, a Python program that starts the words behind its `--`.
    """
    text = "".join(word.replace("\n", " ") + "\n" for word in words)
    matches = [] if _NOT_LAUNCHING.match(text) else list(_LAUNCHER.finditer(text))
    if not matches:
        return None
    end = text.find("\n--\n")
    behind = [one for one in matches if one.lastgroup != "python" and -1 < end < one.start()]
    match = behind[0] if behind and matches[0].lastgroup == "python" else matches[0]
    before, start = (text.count("\n", 0, at) for at in match.span())
    names = [PurePath(word).name for word in words[:before]]
    at = next((index for index, name in enumerate(names) if name in _STARTERS), before)
    task_starter = "".join(names[at : at + 1])
    options = options_of_step(words[at + 1 : before])
    return _Launcher(str(match.lastgroup), task_starter, options, words[start:])


def _read_launch(
    name: str,
    command: ShellCommand,
    launcher: _Launcher,
    job: Job,
    *,
    flags: Mapping[str, str],
    has_device_count: bool,
) -> Launch:
    program, task_starter = launcher.program, launcher.task_starter
    options, rest = _launcher_options(launcher.words, SWITCHES[program].split())
    arguments = _arguments(name, rest if program == "litgpt" else rest[1:], flags)
    refuse_parallelism(Source(name, options | arguments))
    counts = arguments if program == "litgpt" else options
    _refuse_short(name, options)
    open_counts = {key for key in _COUNTS & counts.keys() if is_unknown(counts[key])}
    needed = {*flags.values(), *(() if has_device_count else open_counts)}
    _refuse_unknown(name, command.words, options | arguments, needed)
    for key in open_counts:
        del counts[key]
    has_open_tasks = has_device_count and any(map(is_unknown, launcher.task_options))
    if task_starter == "srun" and not has_open_tasks:
        job = with_options(f"{name} (srun)", launcher.task_options, job)
    elif task_starter:
        job = replace(job, ntasks=None, ntasks_per_node=None)
    source = Source(f"{name} ({program})", options, is_text=True)
    # The words behind -- are another command, which may run elsewhere.
    ids = command.variables.get("CUDA_VISIBLE_DEVICES")
    visible = None if "--" in rest else count_of_ids(ids)
    visible_job = job if ids is None else replace(job, gpus=None, gpus_per_node=visible)
    facts = _processes(program, source, visible_job, task_starter)
    if program == "python" and not task_starter and visible == 1:
        # With more devices the script may start processes, or spread its batches over them.
        facts["devices"] = Fact(1, "CUDA_VISIBLE_DEVICES names", source.name)
    for key in ("devices", "nodes") if open_counts else ():
        facts.pop(key, None)
    others = {
        "switches": options.keys(),
        "deepspeed": options.get("deepspeed_config_file"),
        "gpu_ids": options.get("gpu_ids"),
    }
    return Launch(
        name,
        program,
        Statement("launcher", source.name, facts, others=others),
        _script_statement(f"{name} (script)", program, rest, arguments, flags),
        _files(program, options, arguments, rest),
        command.floors,
        visible,
        not open_counts,
        job,
        task_starter,
        next((key for key in arguments if re.search(r"seq.*len|block_size", key)), ""),
    )


def _refuse_short(name: str, options: Iterable[str]) -> None:
    """Refuse the beginning of an option that counts: torchrun and deepspeed take it for that."""
    short = [
        f"--{key} may be {count}"
        for key in options
        for count in sorted(_COUNTS - {key})
        if len(key) > 1 and count.startswith(key)
    ]
    if short:
        raise ConfigError(
            f"{name}: cannot tell what is counted: {', '.join(short)}; write the option out"
        )


def _refuse_unknown(
    name: str, words: Sequence[str], options: Mapping[str, str], needed: Set[str]
) -> None:
    """Refuse a value that decides the batch, and that only running the script would tell."""
    needed = {*needed, *_FILES}
    unknown = [word for word in words if re.match(r"\$\{\w+:?\+", word)]
    unknown += (
        f"--{key} {value}"
        for key, value in options.items()
        if is_unknown(value) and (key in needed or is_of_batch(key) or is_parallelism(key))
    )
    if unknown:
        raise ConfigError(
            f"{name}: the value of {list_text(unknown, 'and')} is known only once the script runs; "
            "set variables in the script, or nodes, tasks and GPUs in its #SBATCH lines, add "
            f"--devices N for processes, or {_ADVICE}"
        )


def _processes(launcher: str, source: Source, job: Job, task_starter: str) -> dict[str, Fact]:
    """Read the options of a launcher; without devices where only the machine would tell."""
    if launcher == "torchrun":
        return _torchrun_processes(source, job)
    if launcher == "deepspeed":
        return _deepspeed_processes(source)
    if launcher == "accelerate":
        if not source.content.keys().isdisjoint({"use_megatron_lm", "mpirun_hostfile"}):
            raise ConfigError(
                f"{source.name}: --use_megatron_lm and --mpirun_hostfile are not covered; only "
                "data parallelism is covered"
            )
        return facts_of(
            devices=source.fact("num_processes", "count"),
            nodes=source.fact("num_machines", "count"),
            accumulation=source.fact("gradient_accumulation_steps", "count"),
        )
    if launcher == "python" and task_starter == "srun":
        counts = {"devices": (job.tasks, "tasks of srun"), "nodes": (job.nodes, "nodes")}
        return {
            name: Fact(count, key, source.name) for name, (count, key) in counts.items() if count
        }
    return {}


def _torchrun_processes(source: Source, job: Job) -> dict[str, Fact]:
    least, _, most = str(source.content.get("nnodes", 1)).partition(":")
    if most not in {"", least}:
        # An elastic job has no one global batch.
        raise ConfigError(
            f"{source.name}: nnodes {least}:{most} lets the number of nodes change, and the global "
            "batch with it; give one number"
        )
    each = source.content.get("nproc_per_node")
    if each in {"auto", "cpu", "gpu", "xpu"}:
        # Counted on the machine when it starts.
        each = job.gpus_on_node if each in {"auto", "gpu"} else None
    source = replace(source, content={"nnodes": least, "nproc_per_node": each})
    return _over_nodes(source.fact("nproc_per_node", "count"), source.fact("nnodes", "count"))


def _deepspeed_processes(source: Source) -> dict[str, Fact]:
    include = re.search(r"^[\w.-]+:(\d+(,\d+)*)$", str(source.content.get("include")))
    if include:
        counts = {"nodes": 1, "devices": include[1].count(",") + 1}
        return {name: Fact(count, "include", source.name) for name, count in counts.items()}
    nodes, each = source.fact("num_nodes", "count"), source.fact("num_gpus", "count")
    has_hosts = not source.content.keys().isdisjoint({"hostfile", "H", "include", "i"})
    return {} if nodes is None and has_hosts else _over_nodes(each, nodes)


def _over_nodes(each: Fact | None, nodes: Fact | None) -> dict[str, Fact]:
    """Return the processes on all nodes; one node where the number of nodes is not stated."""
    devices = each
    if each and nodes and nodes.value > 1:
        devices = Fact(each.value * nodes.value, f"{each.key} x {nodes.key}", each.source)
    return facts_of(devices=devices, nodes=nodes)


def _script_statement(
    name: str,
    launcher: str,
    rest: Sequence[str],
    options: Mapping[str, str],
    flags: Mapping[str, str],
) -> Statement:
    """Read the arguments of the script, in the words of the program that it seems to be."""
    source = Source(name, options, is_text=True)
    if launcher == "litgpt":
        return read_program(source, "litgpt", flags)
    names_json = is_configuration(options.get("deepspeed", ""))
    is_trainer = "per_device_train_batch_size" in options or (names_json and not flags)
    if is_trainer and not any("no_trainer" in word for word in rest[:1]):
        return read_program(source, "trainer", flags)
    key, micro = "train_batch_size", KINDS["script"].names("micro")
    if launcher == "accelerate" and key in options and options.keys().isdisjoint(micro):
        # The micro-batch in scripts of accelerate and diffusers; elsewhere maybe the global batch.
        flags = flags if key in flags.values() else {"micro_batch_size": key, **flags}
    statement = read_program(source, "script", flags)
    is_read = statement.states("micro", "accumulation", "total") or statement.unused
    return statement if is_read else NOTHING


def _files(
    launcher: str, options: dict[str, str], arguments: Mapping[str, str], rest: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the configurations that a command names, with their kinds."""
    keys = ("config",) if launcher == "litgpt" else ("deepspeed", "deepspeed_config")
    names = {key: arguments.get(key, "") for key in keys}
    names = {key: name for key, name in names.items() if is_configuration(name)}
    files = [(name, _FILES[key]) for key, name in (options | names).items() if key in _FILES]
    if launcher != "litgpt" and len(rest) == 2 and is_configuration(rest[1]):
        # transformers' own parser takes one file in place of all arguments.
        files.append((rest[1], ""))
    return files


def _launcher_options(
    words: Sequence[str], switches: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Read the options of a launcher, and return the words from the script on."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest and re.match("-.", rest[0]):
        name, equals, value = rest.pop(0).partition("=")
        name = _option_name(name)
        if not equals and name not in switches and rest:
            value = rest.pop(0)
        options[name] = value
    return options, rest


def _arguments(where: str, words: Sequence[str], flags: Mapping[str, str]) -> dict[str, str]:
    """Read the arguments of a script; the last of several wins, as argparse has it.

    `--name value`, `--name=value`, and as Hydra has it `name=value`; what the user names may have
    one dash (`-b 8`).
    """
    arguments: dict[str, str] = {}
    with_dashes: set[str] = set()
    for before, word, following in zip(["", *words], words, [*words[1:], "--"], strict=False):
        name, equals, value = word.partition("=")
        key = _option_name(name)
        if word.startswith("--"):
            with_dashes.add(key)
        may_be_value = key in with_dashes or (before.startswith("--") and "=" not in before)
        is_of_user = word.startswith("-") or key in flags.values()
        if equals and may_be_value and is_of_batch(key) and not is_of_user:
            raise ConfigError(
                f"{where}: cannot tell whether {word} is an argument or the value of another; "
                "in front of those with dashes it is an argument"
            )
        is_short = word.startswith("-") and key in flags.values()
        if word.startswith("--") or is_short or (equals and re.match(r"[+\w]", name)):
            takes_next = not equals and not following.startswith("--")
            arguments[key] = following if takes_next else value
    missing = [f"--{name}" for name in flags.values() if name not in arguments]
    if missing:
        present = ", ".join(f"--{name}" for name in arguments) or "none"
        raise ConfigError(
            f"--flag names {missing[0]}, which the command does not have; it has {present}"
        )
    return arguments


def _option_name(name: str) -> str:
    return name.lstrip("-+").replace("-", "_")
