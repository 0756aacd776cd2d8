"""What is started: the command of a run with its placeholders filled in, and its environment."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from batchscape.config import Command
from batchscape.config.template import fill, written
from batchscape.record.folder import RunFolder
from batchscape.record.placeholders import placeholder_values, used_placeholders
from batchscape.record.spec import RunSpec
from batchscape.recorder import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE

__all__ = ["CommandLine", "command_line", "prepare_folder"]

_OF_OTHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Where batchscape itself was started by such a launcher, they are not the program's."""


@dataclass(frozen=True)
class CommandLine:
    """A program, ready to be started."""

    argv: list[str]
    folder: Path
    environment: dict[str, str]


def command_line(spec: RunSpec, command: Command, folder: RunFolder, attempt: int) -> CommandLine:
    """Fill in the command of a run.

    Parameters
    ----------
    command : Command
        Its engine.
    """
    values = {
        **placeholder_values(spec.config, spec.stages),
        "run_dir": str(folder.program.absolute()),
        "run_id": spec.run_id,
        "python": sys.executable,
    }
    used = used_placeholders(command)
    if "port" in used:
        values["port"] = _free_port()
    texts = {name: written(values[name]) for name in used}
    inherited = {key: value for key, value in os.environ.items() if key not in _OF_OTHERS}
    environment = {
        **inherited,
        # Lines that a crash would lose with the program's buffer say why it crashed.
        "PYTHONUNBUFFERED": "1",
        **{name: fill(text, texts) for name, text in command.environment.items()},
        RUN_DIR_VARIABLE: str(folder.program.absolute()),
        ATTEMPT_VARIABLE: str(attempt),
    }
    where = Path(command.cwd).expanduser() if command.cwd else Path.cwd()
    return CommandLine([fill(text, texts) for text in command.argv], where, environment)


def prepare_folder(folder: RunFolder, *, goes_on: bool) -> None:
    """Give the program its folder, empty unless it goes on.

    Parameters
    ----------
    goes_on : bool
        Whether it finds there what an earlier attempt left.
    """
    if not goes_on:
        shutil.rmtree(folder.program, ignore_errors=True)
    folder.program.mkdir(parents=True, exist_ok=True)


def _free_port() -> int:
    """Return a port that nobody listens on; another program may take it before ours does."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
