"""From a command line to a grid of settings, by Hydra."""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import get_args, get_origin

import hydra
import yaml
from hydra.errors import MissingConfigException, OverrideParseException

from batchscape.config.execution import Repeated
from batchscape.config.explain import explained
from batchscape.config.settings import SETTINGS
from batchscape.errors import BatchscapeError, ConfigError
from batchscape.outgoing import outgoing, redact_json
from batchscape.plan.expand import SweepCells
from batchscape.record.commands import hydra_text
from batchscape.text import did_you_mean, near_names, suggest

__all__ = ["MULTIRUN_FLAGS", "compose"]

MULTIRUN_FLAGS = frozenset({"--multirun", "-m"})
_SHOW_FLAGS = frozenset({"--cfg", "-c"})
_TAKE_A_VALUE = _SHOW_FLAGS | {"--config-dir", "-cd"}
_OPTIONS = _TAKE_A_VALUE | MULTIRUN_FLAGS | {"--resolve"}
_OURS = {
    "hydra/sweeper": "expands sweeps itself",
    "hydra.mode": "expands sweeps itself",
    "hydra/launcher": "launches runs itself: with launcher=local where it is called "
    "(launcher.concurrent_runs=N takes several at a time), with launcher=slurm in jobs",
}
"""What Hydra would do and batchscape does."""
_FROM_HYDRA = frozenset({"antlr4", "hydra", "omegaconf", "yaml"})
_OF_OTHERS = {
    "batch.micro_batch_size": "b bs mbs batch_size train_batch_size micro_batch "
    "per_device_train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu",
    "batch.global_batch_size": "bs gbs batch_size train_batch_size total_batch_size",
    "batch.gradient_accumulation_steps": "accum grad_accum accumulate_grad_batches",
    "batch.data_parallel_size": "gpus num_gpus devices world_size num_processes nproc_per_node",
    "optimizer.learning_rate": "lr",
    "optimizer.weight_decay": "wd",
    "budget.optimizer_steps": "steps max_steps train_steps num_steps max_iters iterations",
    "budget.samples": "epochs max_epochs num_epochs num_train_epochs",
    "data.sequence_length": "seq_len seq_length block_size context_length max_seq_length",
    "schedule.warmup_samples": "warmup warmup_steps",
}
"""What settings are called elsewhere."""


def compose(arguments: Sequence[str], program: str) -> SweepCells | None:
    """Compose every cell that a command line asks for.

    Parameters
    ----------
    arguments : sequence of str
        Hydra's overrides and flags, and `--retry STATUS,...`.
    program : str
        What usage messages call the program.

    Returns
    -------
    SweepCells or None
        None where the flags asked Hydra to show something instead.

    Raises
    ------
    ConfigError
        If the arguments make no sense, with Hydra's message where it is the one to tell.
    """
    arguments = _retry_as_setting(arguments)
    _refuse_mistakes(arguments)
    flags = {argument.split("=")[0] for argument in arguments if argument.startswith("-")}
    shows = bool(flags & _SHOW_FLAGS)
    passed = _options_first([a for a in arguments if a not in MULTIRUN_FLAGS])
    # Everything is a grid for us, one run being a grid of one cell.
    command = [program, *passed] if shows else [program, "--multirun", *passed]

    received: list[object] = []

    def receive(grid: object) -> None:
        received.append(grid)

    application = hydra.main(
        config_path="pkg://batchscape.conf", config_name="config", version_base="1.3"
    )(receive)
    told = io.StringIO()
    try:
        # What Hydra shows are settings, which nothing has looked through.
        with _called_as(command), redirect_stdout(told) if shows else nullcontext():
            application()
    except BatchscapeError:
        raise
    except Exception as error:  # Hydra tells bad input by exceptions of any type
        # What fails in our code is our defect, and raised as it is.
        if not _is_from_hydra(error):
            raise
        raise ConfigError(_message(error)) from None
    if shows:
        shown = redact_json(yaml.safe_load(told.getvalue()))
        sys.stdout.write(outgoing("\n".join(explained(shown)) + "\n"))
        return None
    if len(received) != 1 or not isinstance(received[0], SweepCells):
        msg = "the primary configuration must have `override hydra/sweeper: grid` in its defaults"
        raise ConfigError(msg)
    return received[0]


@contextmanager
def _called_as(command: list[str]) -> Iterator[None]:
    """Give Hydra its command line, and have it raise errors instead of printing and leaving."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = command, "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _retry_as_setting(arguments: Sequence[str]) -> list[str]:
    """Write the option `--retry failed,oom` as the setting that it stands for."""
    left, found = list(arguments), []
    while left:
        argument = left.pop(0)
        option, equals, value = argument.partition("=")
        if option != "--retry":
            found.append(argument)
            continue
        names = value if equals else left.pop(0) if left else ""
        known = get_args(Repeated)
        if not set(names.split(",")) <= set(known):
            msg = (
                f"--retry takes statuses of runs, any of {', '.join(known)}, as in "
                f"--retry failed,oom; got {names!r}"
            )
            raise ConfigError(msg)
        found.append(f"launcher.retry=[{names}]")
    return found


def _refuse_mistakes(arguments: Sequence[str]) -> None:
    """Refuse what Hydra would accept, and then run another thing than was meant."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        prefixed, equals, value = argument.partition("=")
        key = prefixed.lstrip("+~")
        if prefixed.startswith("-"):
            if prefixed not in _OPTIONS and before not in _TAKE_A_VALUE:
                known = sorted(o for o in (*_OPTIONS, "--retry") if o.startswith("--"))
                msg = f"there is no option {prefixed}{suggest(prefixed, known)}"
                raise ConfigError(f"{msg}; settings have no dashes")
            continue
        if not equals and argument[:1] != "~" and before not in _TAKE_A_VALUE:
            msg = f"{argument}: settings are given as key=value; a sweep file as sweeps={argument}"
            if "=" in before:
                both = shlex.quote(f"{before} {argument}")
                msg += f"; if it belongs to what stands before it, quote both: {both}"
            raise ConfigError(msg)
        if key == "sweep" or (key == "sweeps" and prefixed != key):
            msg = f"{argument}: a sweep file is chosen with sweeps={value or 'NAME'}"
            raise ConfigError(msg)
        if key in _OURS:
            msg = f"{argument}: batchscape {_OURS[key]}; leave {key} as it is"
            raise ConfigError(msg)


def _options_first(arguments: Sequence[str]) -> list[str]:
    """Put options, with their values, before settings: Hydra takes settings in one piece only."""
    options: list[str] = []
    settings: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if argument in _TAKE_A_VALUE:
            options.append(argument)
            options += left[:1]
            del left[:1]
        else:
            (options if argument.startswith("-") else settings).append(argument)
    return options + settings


def _is_from_hydra(error: Exception) -> bool:
    """Whether an exception was raised by Hydra or what it stands on."""
    raisers = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(raisers[-1]).partition(".")[0] in _FROM_HYDRA


def _message(error: Exception) -> str:
    """Tell what Hydra found, without where it searched and how it failed inside."""
    if isinstance(error, OverrideParseException):
        return _unread(error.override)
    told = str(error).split("\nConfig search path:")[0].strip()
    if isinstance(error, MissingConfigException) and error.options:
        group, _, given = str(error.missing_cfg_file).rpartition("/")
        if given.endswith(".yaml"):
            group, given = group.partition("/")[0], given.removesuffix(".yaml")
            said = (
                f"{group} takes the name of an option, without folder and ending: {group}={given}"
            )
            return f"{said}\n{_of_ones_own(group, given)}"
        # What begins as what was given, else what is spelled nearly so.
        near = [name for name in error.options if given and name.startswith(given)]
        hint = did_you_mean(near or near_names(given, error.options))
        said = f"{group} has no option {given}{hint} Options: {', '.join(error.options)}"
        return f"{said}\n{_of_ones_own(group, given)}"
    if told.startswith("Config group override must be"):
        return (
            "a group takes the name of one of its options, as in schedule=cosine, and nothing else"
        )
    refused = re.match(r"Could not override '([^']+)'", told)
    if refused:
        # The dictionary that lacks the key, in the chosen options.
        there = getattr(error.__cause__, "parent_node", None)
        return _unknown_key(refused[1], list(map(str, there)) if isinstance(there, Mapping) else [])
    cause = str(error.__cause__ or "").strip().splitlines()[:2]
    return "\n".join([told, *cause] if told else cause) or type(error).__name__


def _of_ones_own(group: str, given: str) -> str:
    """Say how an option of the user's own is found, with the folder of it where it is near."""
    name = f"{group}/{given}.yaml"
    near = [folder for folder in (Path(), *sorted(Path().glob("*/"))) if (folder / name).is_file()]
    if near:
        return f"There is {near[0] / name}: add --config-dir {shlex.quote(str(near[0]))}"
    return f"One of your own is found with --config-dir DIR, as DIR/{name}"


def _unread(override: str) -> str:
    """Tell how a text is written whose signs Hydra's grammar gives another meaning, or none."""
    key, _, value = override.partition("=")
    quoted = shlex.quote(f"{key}={hydra_text(value)}")
    return (
        f"{override}: the value cannot be read. A list is written [1,2], choices 1,2; a text with "
        rf"anything but ASCII letters, digits, spaces and /-\+.$%*@?|:_ is quoted, for the shell "
        f"too: {quoted}"
    )


def _unknown_key(key: str, there: list[str]) -> str:
    hints = {setting.key: setting.hint for setting in SETTINGS}
    known = sorted(hints)
    group, _, last = key.rpartition(".")
    misspelt = near_names(last, there)
    if misspelt and get_origin(hints.get(group)) is dict:
        return (
            f"{key} is no entry of the chosen option; did you mean {group}.{misspelt[0]}? "
            f"(Entries: {', '.join(there)}; one that is new takes a plus)"
        )
    for entries in (key, group):
        if get_origin(hints.get(entries)) is dict:
            return (
                f"{entries} takes new entries one by one, with a plus: "
                f"+{entries}.{'NAME' if entries == key else last}=VALUE "
                f"(where the chosen option of {entries.partition('.')[0]} has {entries})"
            )
    if key in known:
        return f"{key} is no setting of the chosen option of {group}; another option has it"
    groups = [] if group else sorted({k.partition(".")[0] for k in known})
    meant = [k for k in known if last in _OF_OTHERS.get(k, "").split()]
    meant = meant or near_names(key, groups)
    if not meant:
        close = near_names(last, (k.rpartition(".")[2] for k in known))
        meant = [k for k in known if k.rpartition(".")[2] in close]
    # A misspelt group is near to the right one.
    meant = [k for k in meant if near_names(group, [k.rpartition(".")[0]])] or meant
    here = [k for k in known if group and k.startswith(f"{group}.")]
    listed = f"\nKnown there: {', '.join(here)}" if here else ""
    return (
        f"{key} is no setting{did_you_mean(meant)}{listed}\nAll settings: batchscape run --cfg job"
    )
