"""Commands that are recorded with runs, and the printed commands that derive from them."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from batchscape.record.folder import SweepFolder
from batchscape.record.timing import is_beside_others, is_mended_by_repeating

ONE_AT_A_TIME = {"launcher.concurrent_runs": "1"}
_FOLDER = ("sweep_dir", "hydra.sweep.dir")
_DROPPED_OPTIONS = frozenset({"--multirun", "-m", "--retry"})
_PLAIN_TEXT = re.compile(r"[\w./+-]+", re.ASCII)


@dataclass(frozen=True)
class LaunchedRun:
    """A run that a printed command is to run again, or whose settings it is to extend."""

    sweep_dir: str
    """Folder of its sweep, as the user wrote it."""
    command: str | None
    """As `command_of` returns it; None where no command launched the run."""
    untimed_reason: str | None = None
    """Why its times do not count."""


def command_of(arguments: Sequence[str]) -> str:
    """Write the command that `launch.json` keeps with every run.

    Parameters
    ----------
    arguments : sequence of str
        Arguments after the verb. A single run counts as a sweep of one.

    Returns
    -------
    str
        For a shell, without `--retry`.
    """
    kept_arguments = [
        argument
        for before, argument in pairwise(["", *arguments])
        if before != "--retry"
        and argument not in _DROPPED_OPTIONS
        and not argument.startswith("--retry=")
    ]
    return shlex.join(["batchscape", "sweep", *kept_arguments])


def changed_command(command: str, sweep_dir: str | Path, settings: Mapping[str, str]) -> str:
    """Return a recorded command with other settings, for runs in the same folder.

    Parameters
    ----------
    command : str
    sweep_dir : str or Path
    settings : mapping of str to str
        Values in Hydra's grammar; they replace those that the command gives.
    """
    replaced_keys = {*settings, *_FOLDER, "launcher.retry"}
    kept_words = [
        word
        for word in shlex.split(command)
        if word.partition("=")[0].lstrip("+~") not in replaced_keys
    ]
    folder = str(sweep_dir)
    # `123` and `null` would not be read as text.
    is_plain = "/" in folder and _PLAIN_TEXT.fullmatch(folder)
    new_settings = {**settings, "sweep_dir": folder if is_plain else hydra_text(folder)}
    return shlex.join([*kept_words, *(f"{key}={value}" for key, value in new_settings.items())])


def time_again(untimed_runs: Iterable[LaunchedRun], next_repeat: Mapping[str, int]) -> str | None:
    """Return the command that measures invalid times again.

    Parameters
    ----------
    untimed_runs : iterable of LaunchedRun
    next_repeat : mapping of str to int
        First unused `timing_repeat`, by sweep folder.

    Returns
    -------
    str or None
        For a shell; several commands where several launched these runs. None where no command is
        known, or repeating would not make the times valid.
    """
    return _commands(
        (r for r in untimed_runs if r.untimed_reason and is_mended_by_repeating(r.untimed_reason)),
        lambda sweep_dir: {"timing_repeat": str(next_repeat.get(sweep_dir, 1))},
    )


def more_seeds(runs: Iterable[LaunchedRun], seeds: Sequence[int]) -> str | None:
    """Return the command that adds seeds to runs; as `time_again`.

    Parameters
    ----------
    runs : iterable of LaunchedRun
    seeds : sequence of int
        All seeds, the existing ones included, which the command skips.
    """

    def setting(sweep_dir: str) -> dict[str, str]:
        if SweepFolder(Path(sweep_dir)).search.space.exists():
            return {"search.grid_seeds": str(len(seeds))}
        return {"seed": ",".join(map(str, seeds))}

    return _commands(runs, setting)


def _commands(
    runs: Iterable[LaunchedRun], settings_of: Callable[[str], dict[str, str]]
) -> str | None:
    """Return the commands that launched runs, with other settings by sweep folder."""
    had_others_by_command: defaultdict[tuple[str, str], bool] = defaultdict(bool)
    for run in runs:
        if run.command is not None:
            had_others = is_beside_others(run.untimed_reason or "")
            had_others_by_command[run.sweep_dir, run.command] |= had_others
    commands = [
        changed_command(
            command, sweep_dir, (ONE_AT_A_TIME if had_others else {}) | settings_of(sweep_dir)
        )
        for (sweep_dir, command), had_others in had_others_by_command.items()
    ]
    return " && ".join(dict.fromkeys(commands)) or None


def hydra_text(text: str) -> str:
    """Quote a text for Hydra's grammar, in which many characters have a meaning.

    Source: https://hydra.cc/docs/1.3/advanced/override_grammar/basic/, "Quoted values".
    """
    # A backslash escapes only before a quote, also before the closing one.
    escaped = re.sub(r'(\\*)("|\Z)', lambda at: at[1] * 2 + at[2].replace('"', '\\"'), text)
    return f'"{escaped}"'
