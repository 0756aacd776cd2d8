"""A launch command: what its launcher starts, and what the script behind it is told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from batchscape.errors import ConfigError
from batchscape.interop.launchers import (
    FLAGS,
    Launcher,
    job_of,
    launcher_of,
    read_launcher,
    starter_of,
)
from batchscape.interop.readers import read_litgpt, read_trainer
from batchscape.interop.shell import ShellCommand, commands_of
from batchscape.interop.slurm import Job, read_directives
from batchscape.interop.statements import Kind, Source, Statement

__all__ = ["Launch", "read_command", "read_flags", "read_script"]

_SCRIPT_MICRO = ("train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu")
_SCRIPT_TOTAL = ("global_batch_size", "total_batch_size")
_FLAG_WORDS = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")
"""What an argument of a script of the user's own may stand for."""
_READ = frozenset(
    (
        *_SCRIPT_MICRO,
        *_SCRIPT_TOTAL,
        "per_device_train_batch_size",
        *("gradient_accumulation_steps", "mixed_precision", "deepspeed", "deepspeed_config"),
        *("nnodes", "nproc_per_node", "num_processes", "num_machines", "num_gpus", "num_nodes"),
        *("include", "devices", "config", "config_file", "deepspeed_config_file"),
    )
)
"""Options that must be known; others may well be left to the machine."""
_GIVE = "give the command with its values after --"
_CONFIG_SUFFIXES = (".json", ".yaml", ".yml")


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
    files: tuple[tuple[str, Kind], ...]
    """Configuration files that the command names, and what they are read as."""
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
        if not name or word not in _FLAG_WORDS:
            msg = (
                f"--flag is NAME=WORD, an argument of your script and one of "
                f"{', '.join(_FLAG_WORDS)}, as in batch-size=micro_batch_size; given {text!r}"
            )
            raise ConfigError(msg)
        if word in flags or name in flags.values():
            msg = f"--flag names each argument and each word once; given again: {text!r}"
            raise ConfigError(msg)
        flags[word] = name
    return flags


def read_script(name: str, text: str, flags: Mapping[str, str] | None = None) -> Launch:
    """Read the launch command of a shell script.

    Parameters
    ----------
    name : str
        Of the file.
    flags : mapping of str to str, optional
        As `read_flags` returns it.

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
    return _read(f"{name}:{command.line}", command, *launcher, job=job, flags=flags or {})


def read_command(words: Sequence[str], flags: Mapping[str, str] | None = None) -> Launch:
    """Read a launch command that is given as words.

    Parameters
    ----------
    flags : mapping of str to str, optional
        As `read_flags` returns it.

    Raises
    ------
    ConfigError
        There is no launcher in it, or a value breaks a rule.
    """
    # The shell has split and expanded it; variables in front of it are words like NAME=value.
    environment, rest = {}, list(words)
    while rest and re.fullmatch(r"[A-Za-z_]\w*=.*", rest[0], re.DOTALL):
        key, _, value = rest.pop(0).partition("=")
        environment[key] = value
    command = ShellCommand(tuple(rest), 1, environment)
    launcher = launcher_of(command.words)
    if launcher is None:
        msg = (
            f"no launch command in {' '.join(words)[:80]!r}: it starts with torchrun, accelerate "
            "launch, deepspeed, litgpt or python"
        )
        raise ConfigError(msg)
    return _read("command line", command, *launcher, job=Job(), flags=flags or {})


def _read(
    name: str,
    command: ShellCommand,
    launcher: Launcher,
    start: int,
    *,
    job: Job,
    flags: Mapping[str, str],
) -> Launch:
    for word in command.words:
        if re.match(r"\$\{\w+:?\+", word):
            msg = f"{name}: what {word} holds only running the script would tell; {_GIVE}"
            raise ConfigError(msg)
    options, rest = _leading(command.words[start:], FLAGS[launcher])
    script_options = _options(rest if launcher == "litgpt" else rest[1:], flags)
    _check_flags(name, launcher, flags, script_options)
    for key, value in {**options, **script_options}.items():
        if key in _READ or key in flags.values() or key.startswith("train."):
            _refuse_unknown(name, key, value)
    visible = command.variables.get("CUDA_VISIBLE_DEVICES")
    starter = starter_of(command.words[:start])
    if starter is not None:
        job = job_of(name, starter, job)
    under = None if starter is None else starter[0]
    return Launch(
        name,
        launcher,
        read_launcher(launcher, Source(name, options, is_text=True), visible, under, job),
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
    if launcher == "litgpt":
        train = {
            key.removeprefix("train."): value
            for key, value in options.items()
            if key.startswith("train.")
        }
        shared = {key: options[key] for key in ("devices", "num_nodes") if key in options}
        content: dict[str, object] = {**shared, "train": train, "subcommand": rest[0:1]}
        found = read_litgpt(Source(name, content, is_text=True))
        return replace(found, others={"subcommand": rest[0] if rest else ""})
    is_trainer = any(key.startswith("per_device_") for key in options) or bool(
        "do_train" in options or options.get("deepspeed")
    )
    script = Path(rest[0]).name if rest else ""
    if is_trainer and "no_trainer" not in script and not flags:
        return read_trainer(Source(name, options, is_text=True))
    source = Source(name, options, is_text=True)
    # What the user names stands for its word alone, whatever it is called.
    names = [key for key in options if key not in flags.values()]

    def one_of(word: str, *known: str) -> str | None:
        return flags.get(word) or next((key for key in known if key in names), None)

    micro = one_of("micro_batch_size", "per_device_train_batch_size", *_SCRIPT_MICRO)
    total = one_of("global_batch_size", *_SCRIPT_TOTAL)
    accumulation = one_of("gradient_accumulation_steps", "gradient_accumulation_steps")
    if micro is None and total is None and accumulation is None:
        return None
    return Statement(
        "script",
        name,
        micro=source.count(micro) if micro else None,
        accumulation=source.count(accumulation) if accumulation else None,
        total=source.count(total) if total else None,
        precision=source.precision("mixed_precision"),
        clipping=source.number("max_grad_norm"),
    )


def _files(
    launcher: Launcher,
    options: Mapping[str, str],
    script: Mapping[str, str],
    rest: Sequence[str],
) -> tuple[tuple[str, Kind], ...]:
    found: list[tuple[str, Kind]] = []
    if launcher == "accelerate":
        found += [(options["config_file"], "accelerate")] if options.get("config_file") else []
        named = options.get("deepspeed_config_file")
        found += [(named, "deepspeed")] if named else []
    for key in ("deepspeed", "deepspeed_config"):
        if script.get(key, "").endswith(_CONFIG_SUFFIXES):
            found.append((script[key], "deepspeed"))
    if launcher == "litgpt" and script.get("config", "").endswith(_CONFIG_SUFFIXES):
        found.append((script["config"], "litgpt"))
    elif launcher != "litgpt" and len(rest) == 2 and rest[1].endswith(_CONFIG_SUFFIXES):
        # The way of transformers' own parser: one file in place of all arguments.
        found.append((rest[1], "trainer"))
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

    What the user names may have one dash (`-b 8`) or, as Hydra has it, none (`batch=8`).
    """
    options: dict[str, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        key = _key(name)
        is_named = key in flags.values() and (bool(equals) or word.startswith("-"))
        if not word.startswith("--") and not is_named:
            continue
        following = words[index + 1] if index + 1 < len(words) else "--"
        if not equals and not following.startswith("--"):
            value = following
        options[key] = value
    return options


def _key(name: str) -> str:
    return name.lstrip("-+").replace("-", "_")


def _check_flags(
    name: str, launcher: Launcher, flags: Mapping[str, str], options: Mapping[str, str]
) -> None:
    """Refuse what names nothing, or an argument of somebody else's script."""
    for key in flags.values():
        if key not in options:
            there = ", ".join(f"--{option}" for option in options) or "none"
            msg = f"{name}: --flag names --{key}, and the command has no such; it has {there}"
            raise ConfigError(msg)
    known = ("per_device_", "train.") if launcher == "litgpt" else ("per_device_",)
    theirs = [key for key in options if key.startswith(known)]
    if flags and theirs:
        msg = (
            f"{name}: --flag is for a script of your own; --{theirs[0]} is known, and says what "
            "the script is"
        )
        raise ConfigError(msg)


def _refuse_unknown(name: str, key: str, value: str) -> None:
    if re.search(r"\$[\w({]|`", value):
        by_slurm = ", or its #SBATCH line" if "SLURM_" in value else ""
        msg = (
            f"{name}: --{key} is {value}, which only running the script would tell; set the "
            f"variable in the script{by_slurm}, or {_GIVE}"
        )
        raise ConfigError(msg)
