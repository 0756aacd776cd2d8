"""A launch command: the processes of its launcher, and the arguments of the script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Literal

from batchscape.errors import ConfigError
from batchscape.interop.readers import (
    BATCH_KEYS,
    FLAG_WORDS,
    Source,
    SourceKind,
    Statement,
    Value,
    count_ids,
    is_configuration,
    is_of_batch,
    is_parallelism,
    read_program,
    refuse_parallelism,
)
from batchscape.interop.shell import ShellCommand, commands_of, is_unknown, listed_words
from batchscape.interop.slurm import JobResources, read_directives, read_options, read_step

LauncherProgram = Literal["torchrun", "paddle", "accelerate", "deepspeed", "litgpt", "python"]


# Options without a value, needed to find where the launcher's options end.
FLAGS: dict[LauncherProgram, frozenset[str]] = {
    "torchrun": listed_words(
        "h help m module no_python run_path standalone use_env virtual_local_rank"
    ),
    "paddle": listed_words("h help"),
    "accelerate": listed_words(
        "cpu debug downcast_bf16 dynamo_use_dynamic dynamo_use_fullgraph "
        "dynamo_use_regional_compilation enable_cpu_affinity fp8_use_autocast_during_eval h help "
        "m module multi_gpu no_python no_tpu_cluster q quiet same_network tpu tpu_cluster "
        "tpu_use_sudo use_deepspeed use_fsdp use_megatron_lm use_parallelism_config"
    ),
    "deepspeed": listed_words(
        "bind_cores_to_rank elastic_training force_multi h help module no_local_rank no_python "
        "no_ssh no_ssh_check q quiet save_pid"
    ),
    "litgpt": frozenset(),
    "python": frozenset(),
}

_MODULES: dict[str, LauncherProgram] = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "paddle.distributed.launch": "paddle",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "litgpt": "litgpt",
}
_PROGRAMS: dict[str, LauncherProgram] = {
    "torchrun": "torchrun",
    "accelerate-launch": "accelerate",
    "deepspeed": "deepspeed",
    "litgpt": "litgpt",
}
_MPI_COUNTS = ("-np", "--np", "-n", "--n", "-c")
_NOT_LAUNCHING = frozenset({"echo", "printf", "pip", "which", "type", "command", "cd", "export"})


def _launcher_of(words: Sequence[str]) -> tuple[LauncherProgram, int] | None:
    """Return the launcher of a command, and where its options begin; None where it has none.

    Programs in front of the launcher (srun, nohup, a Python program that starts the words behind
    its arguments) are skipped.
    """
    if not words or words[0] in _NOT_LAUNCHING:
        return None
    python: tuple[LauncherProgram, int] | None = None
    for index, word in enumerate(words):
        word_before = words[index - 1] if index else ""
        is_value = word_before.startswith("-") and word_before != "--"
        if python and (is_value or not _has_script(words[index:])):
            # The word is the value of an option of the script, not a launcher.
            continue
        launcher = _launcher_at(words, index, PurePath(word).name)
        if launcher is not None and launcher[0] != "python":
            return launcher
        python = python or launcher
    return python


def _has_script(words: Sequence[str]) -> bool:
    return "-m" in words or any(word.endswith(".py") for word in words[1:])


def _launcher_at(
    words: Sequence[str], index: int, program: str
) -> tuple[LauncherProgram, int] | None:
    if program == "ds" and _has_script(words[index:]):
        # Short for deepspeed, but `ds` may also be a folder.
        return "deepspeed", index + 1
    if program in _PROGRAMS:
        return _PROGRAMS[program], index + 1
    if program == "accelerate" and words[index + 1 : index + 2] == ("launch",):
        return "accelerate", index + 2
    if not program.startswith("python") or program.endswith(".py"):
        return None
    at = index + 1
    while at < len(words) and words[at].startswith("-") and words[at] not in {"-m", "-c", "-"}:
        at += 1
    following = list(words[at : at + 2])
    if following[:1] == ["-m"] and len(following) == 2:
        module = _MODULES.get(following[1])
        return ("python", at + 1) if module is None else (module, at + 2)
    return ("python", at) if following and following[0].endswith(".py") else None


def _starter_of(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """Return the program that starts a command in each task (`srun`, `mpirun`), and its options."""
    for index, word in enumerate(words):
        if PurePath(word).name in {"srun", "mpirun", "mpiexec"}:
            return PurePath(word).name, words[index + 1 :]
    return None


def _resources_of_tasks(
    name: str, program: str, options: Sequence[str], job: JobResources
) -> JobResources:
    """Return the resources of the tasks that `srun` or `mpirun` starts in a job."""
    if program == "srun":
        return read_step(f"{name} (srun)", options, job)
    tasks = [f"--ntasks={count}" for flag, count in pairwise(options) if flag in _MPI_COUNTS]
    return read_options(f"{name} ({program})", tasks, JobResources(nodes=job.nodes))


def _read_launcher(
    launcher: LauncherProgram,
    source: Source,
    visible: str | None,
    under: str | None,
    job: JobResources,
) -> Statement:
    """Read the options of a launcher; `devices` stays None where only the machine would tell."""
    others: dict[str, object] = {
        "launcher": launcher,
        "visible": count_ids(visible),
        "under": under,
        "job": job,
    }
    devices = nodes = accumulation = clipping = precision = None
    if launcher in {"torchrun", "paddle"}:
        nodes, per_node = _fixed_nodes(source), _processes_per_node(source, job)
        devices = None if per_node is None else _over_nodes(per_node, nodes)
    elif launcher == "deepspeed":
        nodes, devices = _deepspeed_devices(source)
    elif launcher == "accelerate":
        devices, nodes = source.count("num_processes"), source.count("num_machines")
        accumulation = source.count("gradient_accumulation_steps")
        clipping = source.number("gradient_clipping")
        precision = source.precision()
        others["config_file"] = source.content.get("config_file")
        others["deepspeed_config_file"] = source.content.get("deepspeed_config_file")
        others["gpu_ids"] = count_ids(source.content.get("gpu_ids"))
        others["mpirun"] = bool(source.content.get("mpirun_hostfile"))
        for name in ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm"):
            others[name] = name in source.content
        if others["use_megatron_lm"]:
            msg = (
                f"{source.name}: --use_megatron_lm cuts the model; only data parallelism is covered"
            )
            raise ConfigError(msg)
    elif launcher == "python" and under is not None:
        nodes = None if job.nodes is None else Value(job.nodes, "nodes")
        devices = None if job.all_tasks is None else Value(job.all_tasks, f"tasks of {under}")
    elif launcher == "python" and others["visible"] == 1:
        # With more devices the script may start processes, or spread its batches over them.
        devices = Value(1, "CUDA_VISIBLE_DEVICES names")
    return Statement(
        "launcher",
        f"{source.name} ({_TITLES[launcher]})",
        devices=devices,
        nodes=nodes,
        accumulation=accumulation,
        precision=precision,
        clipping=clipping,
        others=others,
    )


_TITLES: dict[LauncherProgram, str] = {
    "torchrun": "torchrun",
    "paddle": "paddle.distributed.launch",
    "accelerate": "accelerate launch",
    "deepspeed": "deepspeed",
    "litgpt": "litgpt",
    "python": "python",
}


def _fixed_nodes(source: Source) -> Value[int]:
    hosts = count_ids(source.content.get("ips"))
    if hosts is not None:
        return Value(hosts, "ips")
    least, _, most = str(source.content.get("nnodes", 1)).partition(":")
    if most and most != least:
        # An elastic job has no one global batch.
        msg = (
            f"{source.name}: nnodes {least}:{most} lets the number of nodes change, and the global "
            "batch with it; give one number"
        )
        raise ConfigError(msg)
    nodes = Source(source.name, {"nnodes": least}, is_text=True).count("nnodes")
    return nodes or Value(1, "nnodes")


def _processes_per_node(source: Source, job: JobResources) -> Value[int] | None:
    raw = source.content.get("nproc_per_node")
    if raw in {"auto", "cpu", "gpu", "xpu"}:
        # Counted on the machine when it starts.
        count = None if raw in {"cpu", "xpu"} else job.gpus_on_node
        return None if count is None else Value(count, f"nproc_per_node {raw}: GPUs of the job")
    # Paddle's options list the devices themselves. Without any, variables may say the number.
    lists = ((name, count_ids(source.content.get(name))) for name in ("gpus", "devices"))
    ids = next((Value(count, name) for name, count in lists if count is not None), None)
    return source.count("nproc_per_node") or ids


def _deepspeed_devices(source: Source) -> tuple[Value[int] | None, Value[int] | None]:
    nodes, per_node = source.count("num_nodes"), source.count("num_gpus")
    per_node = per_node or source.count("num_accelerators")
    include = source.content.get("include") or source.content.get("i")
    if isinstance(include, str) and ":" in include:
        host_counts = [count_ids(host.partition(":")[2]) for host in include.split("@")]
        per_host = [count for count in host_counts if count is not None]
        if len(per_host) < len(host_counts):
            return None, None
        return Value(len(per_host), "include"), Value(sum(per_host), "include")
    if per_node is None:
        return nodes, None
    if nodes is None and ("hostfile" in source.content or "H" in source.content):
        return None, None
    return nodes, _over_nodes(per_node, nodes)


def _over_nodes(per_node: Value[int], nodes: Value[int] | None) -> Value[int]:
    """Return the number on all nodes; one node where the number of nodes is not stated."""
    if nodes is None or nodes.value == 1:
        return per_node
    count = None if per_node.value is None or nodes.value is None else per_node.value * nodes.value
    return Value(count, f"{per_node.key} x {nodes.key}")


_COUNTS = {
    *("nnodes", "nproc_per_node", "num_processes", "num_machines", "num_gpus", "num_nodes"),
    *("include", "devices", "gpus", "ips"),
}
"""Options of launchers that say how many processes start."""
_KNOWN_OPTIONS = {
    *("mixed_precision", "deepspeed", "deepspeed_config", "config", "config_file"),
    "deepspeed_config_file",
}
"""Other options that must be known; options that do not concern the batch need not be."""
COMMAND_LINE = "command line"
"""Name of a command of the command line, and not of a script."""
_ADVICE = "give the command with its values after --"


@dataclass(frozen=True)
class Launch:
    """One launch command, read."""

    name: str
    """The script file and line, or `command line`."""
    launcher: LauncherProgram
    statement: Statement
    """Of the launcher."""
    script: Statement | None
    """Of the arguments behind the script; None where they do not concern the batch."""
    files: tuple[tuple[str, SourceKind | None], ...]
    """Configuration files that the command names, and their kinds; None: their keys tell."""
    floors: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the script, without the leading dashes."""


def read_flags(texts: Sequence[str]) -> dict[str, str]:
    """Return the arguments of the user's own script by the words that they stand for."""
    flags: dict[str, str] = {}
    for text in texts:
        name, _, word = text.partition("=")
        name = _option_name(name)
        if not name or word not in FLAG_WORDS:
            msg = (
                f"--flag is NAME=WORD, an argument of your script and one of "
                f"{', '.join(FLAG_WORDS)}, as in batch-size=micro_batch_size; given {text!r}"
            )
            raise ConfigError(msg)
        if word in flags or name in flags.values():
            msg = f"--flag NAME=WORD: no NAME and no WORD may come twice; {text!r} repeats one"
            raise ConfigError(msg)
        flags[word] = name
    both = flags.keys() & {"global_batch_tokens", "sequence_length"}
    if len(both) == 1 or (both and "global_batch_size" in flags):
        msg = (
            "--flag takes global_batch_tokens and sequence_length together, in place of "
            f"global_batch_size, which counts samples; given {', '.join(texts)}"
        )
        raise ConfigError(msg)
    return flags


def read_script(
    name: str,
    text: str,
    flags: Mapping[str, str] | None = None,
    *,
    has_device_count: bool = False,
) -> Launch:
    """Read the only launch command of a shell script.

    With `has_device_count` the user states the number of processes, so that the command need not.
    """
    job = read_directives(name, text)
    commands = [
        (command, launcher)
        for command in commands_of(name, text, job.variables)
        if (launcher := _launcher_of(command.words)) is not None
    ]
    # Plain Python in such a script mostly prepares the data.
    launches = [
        (command, launcher)
        for command, launcher in commands
        if launcher[0] != "python" or _starter_of(command.words[: launcher[1]])
    ] or commands
    if not launches:
        msg = (
            f"{name}: no launch command found (torchrun, accelerate launch, deepspeed, litgpt, "
            "python); if it is a configuration file, its name must end in .json, .yaml or .yml"
        )
        if name == COMMAND_LINE:
            msg = (
                f"no launch command in {text[:80]!r}: a launch command starts with torchrun, "
                "accelerate launch, deepspeed, litgpt or python"
            )
        raise ConfigError(msg)
    if len(launches) > 1:
        lines = ", ".join(str(command.line) for command, _ in launches)
        msg = (
            f"{name}: {len(launches)} launch commands (lines {lines}); give the one to check: "
            "batchscape check-config -- COMMAND"
        )
        raise ConfigError(msg)
    ((command, launcher),) = launches
    where = name if name == COMMAND_LINE else f"{name}:{command.line}"
    return _read_command(
        where, command, *launcher, job=job, flags=flags or {}, has_device_count=has_device_count
    )


def _read_command(
    name: str,
    command: ShellCommand,
    launcher: LauncherProgram,
    start: int,
    *,
    job: JobResources,
    flags: Mapping[str, str],
    has_device_count: bool,
) -> Launch:
    for word in command.words:
        if re.match(r"\$\{\w+:?\+", word):
            msg = f"{name}: what {word} holds only running the script would tell; {_ADVICE}"
            raise ConfigError(msg)
    options, rest = _launcher_options(command.words[start:], FLAGS[launcher])
    script_options = _script_options(rest if launcher == "litgpt" else rest[1:], flags)
    for key in flags.values():
        if key not in script_options:
            present = ", ".join(f"--{option}" for option in script_options) or "none"
            msg = f"{name}: --flag names --{key}, which the command does not have; it has {present}"
            raise ConfigError(msg)
    refuse_parallelism(name, {**options, **script_options})
    count_options = script_options if launcher == "litgpt" else options
    unknown_counts = [
        key for key in count_options if key in _COUNTS and is_unknown(count_options[key])
    ]
    for key, value in {**options, **script_options}.items():
        is_read = (
            key in {*_KNOWN_OPTIONS, *flags.values()} or is_of_batch(key) or is_parallelism(key)
        )
        if is_unknown(value) and (is_read or (key in unknown_counts and not has_device_count)):
            by_slurm = ", or its #SBATCH line" if "SLURM_" in value else ""
            option = "add --devices N, " if key in unknown_counts else ""
            msg = (
                f"{name}: --{key} is {value}, which only running the script would tell; {option}"
                f"set the variable in the script{by_slurm}, or {_ADVICE}"
            )
            raise ConfigError(msg)
    for key in unknown_counts:
        del count_options[key]
    # The words behind -- are another command, which may run elsewhere.
    visible = None if "--" in rest else command.variables.get("CUDA_VISIBLE_DEVICES")
    starter = _starter_of(command.words[:start])
    if starter is not None:
        counts_unknown = has_device_count and any(map(is_unknown, starter[1]))
        job = JobResources() if counts_unknown else _resources_of_tasks(name, *starter, job)
    under = None if starter is None else starter[0]
    statement = _read_launcher(launcher, Source(name, options, is_text=True), visible, under, job)
    if unknown_counts:
        others = {**statement.others, "uncounted": True}
        statement = replace(statement, devices=None, nodes=None, others=others)
    return Launch(
        name,
        launcher,
        statement,
        _script_statement(f"{name} (script)", launcher, rest, script_options, flags),
        files=_files(launcher, options, script_options, rest),
        floors=command.floors,
        options=script_options,
    )


def _script_statement(
    source_name: str,
    launcher: LauncherProgram,
    rest: Sequence[str],
    options: Mapping[str, str],
    flags: Mapping[str, str],
) -> Statement | None:
    """Read the arguments of the script, in the words of the program that it seems to be."""
    source = Source(source_name, options, is_text=True)
    script = Path(rest[0]).name if rest else ""
    names_json = is_configuration(options.get("deepspeed", ""))
    is_trainer = "per_device_train_batch_size" in options or (names_json and not flags)
    if launcher == "litgpt":
        return read_program(source, "litgpt", flags)
    if is_trainer and "no_trainer" not in script:
        return read_program(source, "trainer", flags)
    name, others = "train_batch_size", BATCH_KEYS["script"]["micro"]
    if launcher == "accelerate" and name in options and not options.keys() & {*others}:
        # The micro-batch in scripts of accelerate and diffusers; elsewhere maybe the global batch.
        flags = flags if name in flags.values() else {"micro_batch_size": name, **flags}
    statement = read_program(source, "script", flags)
    return statement if statement.states_batch or statement.unused else None


def _files(
    launcher: LauncherProgram,
    options: Mapping[str, str],
    script: Mapping[str, str],
    rest: Sequence[str],
) -> tuple[tuple[str, SourceKind | None], ...]:
    files: list[tuple[str, SourceKind | None]] = []
    if launcher == "accelerate":
        if options.get("config_file"):
            files.append((options["config_file"], "accelerate"))
        if options.get("deepspeed_config_file"):
            files.append((options["deepspeed_config_file"], "deepspeed"))
    keys = ("deepspeed", "deepspeed_config")
    files += [(script[key], "deepspeed") for key in keys if is_configuration(script.get(key, ""))]
    if launcher == "litgpt" and is_configuration(script.get("config", "")):
        files.append((script["config"], "litgpt"))
    elif launcher != "litgpt" and len(rest) == 2 and is_configuration(rest[1]):
        # transformers' own parser takes one file in place of all arguments.
        files.append((rest[1], None))
    return tuple(files)


def _launcher_options(
    words: Sequence[str], flags: frozenset[str]
) -> tuple[dict[str, str], list[str]]:
    """Read the options of a launcher, up to the script."""
    options: dict[str, str] = {}
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        name, equals, value = words[index].lstrip("-").partition("=")
        name = name.replace("-", "_")
        index += 1
        if not equals and name in flags:
            value = "true"
        elif not equals and index < len(words):
            value = words[index]
            index += 1
        options[name] = value
    return options, list(words[index:])


def _script_options(words: Sequence[str], flags: Mapping[str, str]) -> dict[str, str]:
    """Read the arguments of a script; the last of several wins, as argparse has it.

    `--name value`, `--name=value`, and as Hydra has it `name=value`; what the user names may have
    one dash (`-b 8`).
    """
    options: dict[str, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        is_short = word.startswith("-") and _option_name(name) in flags.values()
        if not (word.startswith("--") or is_short or (equals and re.match(r"[+\w]", name))):
            continue
        following = words[index + 1] if index + 1 < len(words) else "--"
        if not equals and not following.startswith("--"):
            value = following
        options[_option_name(name)] = value
    return options


def _option_name(name: str) -> str:
    return name.lstrip("-+").replace("-", "_")
