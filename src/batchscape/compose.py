"""A grid of settings, composed by Hydra from a command line."""

from __future__ import annotations

import argparse
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

_SHORT = {"-c": "--cfg", "-cd": "--config-dir", "-m": "--multirun"}
_REPLACED_SETTINGS = {
    "hydra/sweeper": "expands sweeps itself",
    "hydra.mode": "expands sweeps itself",
    "hydra/launcher": "launches runs itself: with launcher=local where it is called "
    "(launcher.concurrent_runs=N takes several at a time), with launcher=slurm in jobs",
}
"""Settings of Hydra that have no effect, and what batchscape does in their place."""
_FROM_HYDRA = frozenset({"antlr4", "hydra", "omegaconf", "yaml"})
_NAMES_ELSEWHERE = {
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
"""Names that other programs have for our settings."""


def compose(
    arguments: Sequence[str], program: str, options_read: Sequence[str] = ()
) -> SweepCells | None:
    """Compose every cell of a command line; None where its flags ask to show the settings.

    `options_read` are options that the verb has read before: an unknown one may be meant for them.
    """
    options, settings = _options_and_settings(arguments, options_read)
    _refuse_mistakes(settings)
    shows_settings = options.cfg is not None
    # One run is a grid of one cell.
    command = [program, f"--cfg={options.cfg}" if shows_settings else "--multirun"]
    if options.config_dir is not None:
        command.append(f"--config-dir={options.config_dir}")
    command += ["--resolve"] * options.resolve + settings

    grids: list[object] = []

    def receive(grid: object) -> None:
        grids.append(grid)

    application = hydra.main(
        config_path="pkg://batchscape.conf", config_name="config", version_base="1.3"
    )(receive)
    output = io.StringIO()
    try:
        # Hydra prints settings as they are, with secrets.
        with _command_line(command), redirect_stdout(output) if shows_settings else nullcontext():
            application()
    except BatchscapeError:
        raise
    except Exception as error:  # Hydra raises exceptions of any type for bad input
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        # An error of our own code is a defect, and keeps its traceback.
        if str(frames[-1].f_globals["__name__"]).partition(".")[0] not in _FROM_HYDRA:
            raise
        raise ConfigError(_message(error)) from None
    if shows_settings:
        plain_settings = redact_json(yaml.safe_load(output.getvalue()))
        sys.stdout.write(outgoing("\n".join(explained(plain_settings)) + "\n"))
        return None
    if len(grids) != 1 or not isinstance(grids[0], SweepCells):
        raise ConfigError(
            "the primary configuration must have `override hydra/sweeper: grid` in its defaults"
        )
    return grids[0]


@contextmanager
def _command_line(command: list[str]) -> Iterator[None]:
    """Give Hydra its command line, and have it raise errors instead of printing and leaving."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = command, "1"
    try:
        yield
    finally:
        sys.argv = argv
        del os.environ["HYDRA_FULL_ERROR"]
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _options_and_settings(
    arguments: Sequence[str], options_read: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the settings, of which `--retry failed,oom` becomes one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--cfg")
    parser.add_argument("--config-dir")
    parser.add_argument("--multirun", action="store_true")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--retry", nargs="?", const="", action="append", default=[])
    try:
        options, settings = parser.parse_known_args([*map(_long_form, arguments)])
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if unknown := next((word for word in settings if word.startswith("-")), None):
        name = unknown.partition("=")[0]
        names = (*options_read, "--cfg", "--config-dir", "--multirun", "--resolve", "--retry")
        raise ConfigError(
            f"there is no option {name}{suggest(name, names)}; settings have no dashes"
        )
    statuses = get_args(Repeated)
    for text in options.retry:
        if not set(text.split(",")) <= set(statuses):
            raise ConfigError(
                f"--retry takes statuses of runs, any of {', '.join(statuses)}, as in "
                f"--retry failed,oom; got {text!r}"
            )
    # A setting that says otherwise comes later, and wins.
    return options, [*(f"launcher.retry=[{text}]" for text in options.retry), *settings]


def _long_form(argument: str) -> str:
    """Write an option of one letter or two as Hydra's long one, with its value."""
    name, equals, value = argument.partition("=")
    return f"{_SHORT.get(name, name)}{equals}{value}"


def _refuse_mistakes(settings: Sequence[str]) -> None:
    """Refuse settings that Hydra would accept with another meaning than the user's."""
    for previous, argument in zip(["", *settings], settings, strict=False):
        prefixed, equals, value = argument.partition("=")
        key = prefixed.lstrip("+~")
        if not equals and argument[:1] != "~":
            hint = ""
            if "=" in previous:
                both = shlex.quote(f"{previous} {argument}")
                hint = f"; if it belongs to the setting before it, quote both: {both}"
            raise ConfigError(
                f"{argument}: settings are given as key=value; a sweep file as "
                f"sweeps={argument}{hint}"
            )
        if key == "sweep" or (key == "sweeps" and prefixed != key):
            raise ConfigError(f"{argument}: a sweep file is chosen with sweeps={value or 'NAME'}")
        if key in _REPLACED_SETTINGS:
            raise ConfigError(
                f"{argument}: batchscape {_REPLACED_SETTINGS[key]}; leave {key} as it is"
            )


def _message(error: Exception) -> str:
    """Return Hydra's message without its search path and its internal causes."""
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        quoted = shlex.quote(f"{key}={hydra_text(value)}")
        return (
            f"{error.override}: the value cannot be read. A list is written [1,2], choices 1,2; a "
            rf"text with anything but ASCII letters, digits, spaces and /-\+.$%*@?|:_ is quoted, "
            f"for the shell too: {quoted}"
        )
    if isinstance(error, MissingConfigException) and error.options:
        return _missing_option(str(error.missing_cfg_file), error.options)
    message = str(error).split("\nConfig search path:")[0].strip()
    if message.startswith("Config group override must be"):
        return (
            "a group takes the name of one of its options, as in schedule=cosine, and nothing else"
        )
    if key_match := re.match(r"Could not override '([^']+)'", message):
        # The dictionary that lacks the key, in the chosen options.
        parent = getattr(error.__cause__, "parent_node", None)
        return _unknown_key(
            key_match[1], [*map(str, parent)] if isinstance(parent, Mapping) else []
        )
    cause = str(error.__cause__ or "").strip().splitlines()[:2]
    return "\n".join([message, *cause] if message else cause) or type(error).__name__


def _missing_option(file: str, options: Sequence[str]) -> str:
    """Say which option of a group may be meant, and how an option of the user's own is found."""
    group, _, name = file.rpartition("/")
    if name.endswith(".yaml"):
        # A path was given in place of a name.
        group, name = group.partition("/")[0], name.removesuffix(".yaml")
        problem = f"{group} takes the name of an option, without folder and ending: {group}={name}"
    else:
        # An option that begins with the name, else one that is spelled nearly so.
        near_options = [option for option in options if name and option.startswith(name)]
        hint = did_you_mean(near_options or near_names(name, options))
        problem = f"{group} has no option {name}{hint} Options: {', '.join(options)}"
    file = f"{group}/{name}.yaml"
    folders = [place for place in (Path(), *sorted(Path().glob("*/"))) if (place / file).is_file()]
    if folders:
        folder = shlex.quote(str(folders[0]))
        return f"{problem}\nThere is {folders[0] / file}: add --config-dir {folder}"
    return f"{problem}\nOne of your own is found with --config-dir DIR, as DIR/{file}"


def _unknown_key(key: str, present_keys: list[str]) -> str:
    hints = {setting.key: setting.hint for setting in SETTINGS}
    keys = sorted(hints)
    group, _, last = key.rpartition(".")
    near_entries = [f"{group}.{name}" for name in near_names(last, present_keys)]
    for entries, name, near in ((group, last, near_entries), (key, "NAME", [])):
        if get_origin(hints.get(entries)) is dict:
            if near:
                listed = ", ".join(present_keys)
                return (
                    f"{key} is no entry of the chosen option{did_you_mean(near)} "
                    f"Entries: {listed}; one that is new takes a plus"
                )
            return (
                f"{entries} takes new entries one by one, with a plus: "
                f"+{entries}.{name}=VALUE (where the chosen option of {entries.partition('.')[0]} "
                f"has {entries})"
            )
    if key in keys:
        return f"{key} is no setting of the chosen option of {group}; another option has it"
    groups = [] if group else sorted({other.partition(".")[0] for other in keys})
    similar = [other for other in keys if last in _NAMES_ELSEWHERE.get(other, "").split()]
    similar = similar or near_names(key, groups)
    if not similar:
        close = near_names(last, (other.rpartition(".")[2] for other in keys))
        similar = [other for other in keys if other.rpartition(".")[2] in close]
    # A misspelt group is near to the right one.
    in_near_group = [other for other in similar if near_names(group, [other.rpartition(".")[0]])]
    group_keys = [other for other in keys if group and other.startswith(f"{group}.")]
    listed = f"\nKnown there: {', '.join(group_keys)}" if group_keys else ""
    return (
        f"{key} is no setting{did_you_mean(in_near_group or similar)}{listed}\n"
        "All settings: batchscape run --cfg job"
    )
