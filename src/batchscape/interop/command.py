"""A launch command: what its launcher starts, and what the script behind it is told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from batchscape.errors import ConfigError
from batchscape.interop.files import is_configuration
from batchscape.interop.launchers import (
    FLAGS,
    Launcher,
    job_of,
    launcher_of,
    read_launcher,
    starter_of,
)
from batchscape.interop.readers import (
    BATCH_KEYS,
    FLAG_WORDS,
    is_of_batch,
    is_parallelism,
    read_program,
    refuse_parallelism,
)
from batchscape.interop.shell import ShellCommand, commands_of, is_unknown
from batchscape.interop.slurm import JobResources, read_directives
from batchscape.interop.statements import Kind, Source, Statement

__all__ = ["COMMAND_LINE", "Launch", "read_flags", "read_script"]

_COUNTS = {
    *("nnodes", "nproc_per_node", "num_processes", "num_machines", "num_gpus", "num_nodes"),
    *("include", "devices", "gpus", "ips"),
}
"""Options of launchers that say how many processes start."""
_READ = {
    *("mixed_precision", "deepspeed", "deepspeed_config", "config", "config_file"),
    "deepspeed_config_file",
}
"""Other options that must be known; what says nothing of a batch may be left to the machine."""
COMMAND_LINE = "command line"
"""Name of a command that is given itself, and not by a script."""
_GIVE = "give the command with its values after --"


@dataclass(frozen=True)
class Launch:
    """One launch command, read."""

    name: str
    """The script file and line, or `command line`."""
    launcher: Launcher
    statement: Statement
    """Of the launcher."""
    script: Statement | None
    """Of the arguments behind the script; None where they say nothing of the batch."""
    files: tuple[tuple[str, Kind | None], ...]
    """Configuration files that the command names, and what they are; None: their keys tell."""
    floors: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the script, without the leading dashes."""


def read_flags(texts: Sequence[str]) -> dict[str, str]:
    """Read what the user says of the arguments of their own script.

    Parameters
    ----------
    texts : sequence of str
        `NAME=WORD`: the argument, dashes or not, and one of the words.

    Returns
    -------
    dict of str to str
        The argument by the word.

    Raises
    ------
    ConfigError
        One has another form, an unknown word, or comes twice.
    """
    flags: dict[str, str] = {}
    for text in texts:
        name, _, word = text.partition("=")
        name = _key(name)
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
    counts_told: bool = False,
) -> Launch:
    """Read the launch command of a shell script.

    Parameters
    ----------
    name : str
        Of the file.
    flags : mapping of str to str, optional
        As `read_flags` returns it.
    counts_told : bool
        Whether the user says how many processes start, so that the command need not.

    Raises
    ------
    ConfigError
        The script has no launch command, or several, or one whose values cannot be known
        without running it.
    """
    job = read_directives(name, text)
    found = [
        (command, launcher_of(command.words)) for command in commands_of(name, text, job.variables)
    ]
    commands = [(command, launcher) for command, launcher in found if launcher is not None]
    # Plain Python in such a script mostly prepares the data.
    chosen = [
        (command, launcher)
        for command, launcher in commands
        if launcher[0] != "python" or starter_of(command.words[: launcher[1]])
    ] or commands
    if not chosen:
        msg = (
            f"{name}: no launch command found (torchrun, accelerate launch, deepspeed, litgpt, "
            "python); a configuration file ends in .json, .yaml or .yml"
        )
        raise ConfigError(msg)
    if len(chosen) > 1:
        lines = ", ".join(str(command.line) for command, _ in chosen)
        msg = (
            f"{name}: {len(chosen)} launch commands (lines {lines}); give the one to check: "
            "batchscape check-config -- COMMAND"
        )
        raise ConfigError(msg)
    ((command, launcher),) = chosen
    where = name if name == COMMAND_LINE else f"{name}:{command.line}"
    return _read(where, command, *launcher, job=job, flags=flags or {}, counts_told=counts_told)


def _read(
    name: str,
    command: ShellCommand,
    launcher: Launcher,
    start: int,
    *,
    job: JobResources,
    flags: Mapping[str, str],
    counts_told: bool,
) -> Launch:
    for word in command.words:
        if re.match(r"\$\{\w+:?\+", word):
            msg = f"{name}: what {word} holds only running the script would tell; {_GIVE}"
            raise ConfigError(msg)
    options, rest = _leading(command.words[start:], FLAGS[launcher])
    script_options = _options(rest if launcher == "litgpt" else rest[1:], flags)
    for key in flags.values():
        if key not in script_options:
            there = ", ".join(f"--{option}" for option in script_options) or "none"
            msg = f"{name}: --flag names --{key}, and the command has no such; it has {there}"
            raise ConfigError(msg)
    refuse_parallelism(name, {**options, **script_options})
    counted = script_options if launcher == "litgpt" else options
    uncounted = [key for key in counted if key in _COUNTS and is_unknown(counted[key])]
    for key, value in {**options, **script_options}.items():
        is_read = key in {*_READ, *flags.values()} or is_of_batch(key) or is_parallelism(key)
        if is_unknown(value) and (is_read or (key in uncounted and not counts_told)):
            by_slurm = ", or its #SBATCH line" if "SLURM_" in value else ""
            or_told = "add --devices N, " if key in uncounted else ""
            msg = (
                f"{name}: --{key} is {value}, which only running the script would tell; {or_told}"
                f"set the variable in the script{by_slurm}, or {_GIVE}"
            )
            raise ConfigError(msg)
    for key in uncounted:
        del counted[key]
    # What stands behind -- is a command of its own, and may run elsewhere.
    visible = None if "--" in rest else command.variables.get("CUDA_VISIBLE_DEVICES")
    starter = starter_of(command.words[:start])
    if starter is not None:
        is_told = counts_told and any(map(is_unknown, starter[1]))
        job = JobResources() if is_told else job_of(name, starter, job)
    under = None if starter is None else starter[0]
    statement = read_launcher(launcher, Source(name, options, is_text=True), visible, under, job)
    if uncounted:
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
    name: str,
    launcher: Launcher,
    rest: Sequence[str],
    options: Mapping[str, str],
    flags: Mapping[str, str],
) -> Statement | None:
    """Return what the arguments of the script say, in the words of whose script it seems to be."""
    source = Source(name, options, is_text=True)
    script = Path(rest[0]).name if rest else ""
    names_json = is_configuration(options.get("deepspeed", ""))
    is_trainer = "per_device_train_batch_size" in options or (names_json and not flags)
    if launcher == "litgpt":
        return read_program(source, "litgpt", flags)
    if is_trainer and "no_trainer" not in script:
        return read_program(source, "trainer", flags)
    if launcher == "accelerate" and not options.keys() & BATCH_KEYS["script"]["micro"]:
        # What scripts of accelerate and diffusers call it; elsewhere it may be the global batch.
        taken = "train_batch_size" in flags.values() or "train_batch_size" not in options
        flags = flags if taken else {"micro_batch_size": "train_batch_size", **flags}
    statement = read_program(source, "script", flags)
    return statement if statement.states_batch or statement.unused else None


def _files(
    launcher: Launcher,
    options: Mapping[str, str],
    script: Mapping[str, str],
    rest: Sequence[str],
) -> tuple[tuple[str, Kind | None], ...]:
    found: list[tuple[str, Kind | None]] = []
    if launcher == "accelerate":
        found += [(options["config_file"], "accelerate")] if options.get("config_file") else []
        named = options.get("deepspeed_config_file")
        found += [(named, "deepspeed")] if named else []
    for key in ("deepspeed", "deepspeed_config"):
        if is_configuration(script.get(key, "")):
            found.append((script[key], "deepspeed"))
    if launcher == "litgpt" and is_configuration(script.get("config", "")):
        found.append((script["config"], "litgpt"))
    elif launcher != "litgpt" and len(rest) == 2 and is_configuration(rest[1]):
        # The way of transformers' own parser: one file in place of all arguments.
        found.append((rest[1], None))
    return tuple(found)


def _leading(words: Sequence[str], flags: frozenset[str]) -> tuple[dict[str, str], list[str]]:
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


def _options(words: Sequence[str], flags: Mapping[str, str]) -> dict[str, str]:
    """Read the arguments of a script; the last of several wins, as argparse has it.

    `--name value`, `--name=value`, and as Hydra has it `name=value`; what the user names may have
    one dash (`-b 8`).
    """
    options: dict[str, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        is_short = word.startswith("-") and _key(name) in flags.values()
        if not (word.startswith("--") or is_short or (equals and re.match(r"[+\w]", name))):
            continue
        following = words[index + 1] if index + 1 < len(words) else "--"
        if not equals and not following.startswith("--"):
            value = following
        options[_key(name)] = value
    return options


def _key(name: str) -> str:
    return name.lstrip("-+").replace("-", "_")
