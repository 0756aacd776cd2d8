"""A launch command: what its launcher starts, and what the script behind it is told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from batchscape.errors import ConfigError
from batchscape.interop.launchers import FLAGS, Launcher, launcher_of, read_launcher
from batchscape.interop.readers import read_litgpt, read_trainer
from batchscape.interop.shell import Command, commands_of
from batchscape.interop.statements import Kind, Source, Statement

__all__ = ["Launch", "read_command", "read_script"]

_SCRIPT_MICRO = ("train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu")
_SCRIPT_TOTAL = ("global_batch_size", "total_batch_size")
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


def read_script(name: str, text: str) -> Launch:
    """Read the launch command of a shell script.

    Parameters
    ----------
    name : str
        Of the file.
    text : str

    Raises
    ------
    ConfigError
        The script has no launch command, or several, or one whose values cannot be known
        without running it.
    """
    found = [(command, launcher_of(command.words)) for command in commands_of(name, text)]
    commands = [(command, launcher) for command, launcher in found if launcher is not None]
    # Plain Python in such a script mostly prepares the data.
    chosen = [pair for pair in commands if pair[1][0] != "python"] or commands
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
    return _read(f"{name}:{command.line}", command, *launcher)


def read_command(words: Sequence[str]) -> Launch:
    """Read a launch command that is given as words.

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
    command = Command(tuple(rest), 1, environment)
    launcher = launcher_of(command.words)
    if launcher is None:
        msg = (
            f"no launch command in {' '.join(words)[:80]!r}: it starts with torchrun, accelerate "
            "launch, deepspeed, litgpt or python"
        )
        raise ConfigError(msg)
    return _read("command line", command, *launcher)


def _read(name: str, command: Command, launcher: Launcher, start: int) -> Launch:
    for word in command.words[start:]:
        if word.removeprefix("$") in command.undecided:
            msg = (
                f"{name}: what {word} holds depends on a condition of the script; give the command "
                "with its values after --"
            )
            raise ConfigError(msg)
    options, rest = _leading(command.words[start:], FLAGS[launcher])
    script_options = options if launcher == "litgpt" else _options(rest[1:])
    if launcher == "litgpt":
        script_options = _options(rest)
    for key, value in {**options, **script_options}.items():
        if key in _READ or key.startswith("train."):
            _refuse_unknown(name, key, value)
    visible = command.environment.get("CUDA_VISIBLE_DEVICES")
    statement = read_launcher(launcher, Source(name, options, is_text=True), visible)
    launch = Launch(
        name,
        launcher,
        statement,
        None,
        files=_files(launcher, options, script_options, rest),
        floors=command.floors,
        options=script_options,
    )
    return replace(launch, script=_script_statement(launch, rest))


def _script_statement(launch: Launch, rest: Sequence[str]) -> Statement | None:
    """Return what the arguments of the script say, in the words of whose script it seems to be."""
    options = launch.options
    name = f"{launch.name} (script)"
    if launch.launcher == "litgpt":
        train = {
            key.removeprefix("train."): value
            for key, value in options.items()
            if key.startswith("train.")
        }
        shared = {key: options[key] for key in ("devices", "num_nodes") if key in options}
        content: dict[str, object] = {**shared, "train": train, "subcommand": rest[0:1]}
        found = read_litgpt(Source(name, content, is_text=True))
        return replace(found, others={"subcommand": rest[0] if rest else ""})
    is_trainer = any(key.startswith(("per_device_", "per_gpu_")) for key in options) or bool(
        {"do_train"} & options.keys() or options.get("deepspeed")
    )
    script = Path(rest[0]).name if rest else ""
    if is_trainer and "no_trainer" not in script:
        return read_trainer(Source(name, options, is_text=True))
    source = Source(name, options, is_text=True)
    micro = next(
        (key for key in ("per_device_train_batch_size", *_SCRIPT_MICRO) if key in options), None
    )
    total = next((key for key in _SCRIPT_TOTAL if key in options), None)
    if micro is None and total is None and "gradient_accumulation_steps" not in options:
        return None
    return Statement(
        "script",
        name,
        micro=source.count(micro) if micro else None,
        accumulation=source.count("gradient_accumulation_steps"),
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


def _options(words: Sequence[str]) -> dict[str, str]:
    """Read the arguments of a script; the last of several wins, as argparse has it."""
    options: dict[str, str] = {}
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        following = words[index + 1] if index + 1 < len(words) else "--"
        if not equals and not following.startswith("--"):
            value = following
        options[name.replace("-", "_")] = value
    return options


def _refuse_unknown(name: str, key: str, value: str) -> None:
    if re.search(r"\$[\w({]|`", value):
        msg = (
            f"{name}: --{key} is {value}, which only running the script would tell; set the "
            "variable in the script, or give the command with its values after --"
        )
        raise ConfigError(msg)
