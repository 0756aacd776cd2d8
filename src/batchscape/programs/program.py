"""A program: its command line and folder, and how it runs, held by a guard that ends all of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchscape.config import Command
from batchscape.config.template import fill, to_text
from batchscape.errors import LaunchError
from batchscape.record.folder import RunFolder
from batchscape.record.placeholders import placeholder_values, used_placeholders
from batchscape.record.spec import RunSpec
from batchscape.recorder import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE

_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Set by torchrun and its like for their ranks. Where batchscape was started so, a program must not
inherit them."""


def command_line(
    spec: RunSpec, command: Command, folder: RunFolder, attempt: int
) -> tuple[list[str], Path, dict[str, str]]:
    """Return the arguments of a run's program, the folder to start it in, and its environment."""
    values = {
        **placeholder_values(spec.config, spec.stages),
        "run_dir": str(folder.program.absolute()),
        "run_id": spec.run_id,
        "python": sys.executable,
    }
    placeholders = used_placeholders(command)
    if "port" in placeholders:
        # Another program may take it before this one does.
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            values["port"] = listener.getsockname()[1]
    texts = {name: to_text(values[name]) for name in placeholders}
    inherited_variables = {
        key: value for key, value in os.environ.items() if key not in _RANK_VARIABLES
    }
    environment = {
        **inherited_variables,
        # A crash would lose the buffered lines that say why it crashed.
        "PYTHONUNBUFFERED": "1",
        **{name: fill(text, texts) for name, text in command.environment.items()},
        RUN_DIR_VARIABLE: str(folder.program.absolute()),
        ATTEMPT_VARIABLE: str(attempt),
    }
    argv = [fill(text, texts) for text in command.argv]
    return argv, Path(command.cwd or ".").expanduser(), environment


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended."""

    code: int
    """Exit code; negative: the signal that killed it."""
    processes_left: int
    """Processes that it left behind, which were killed."""


class Program:
    """A program and every process that it starts."""

    def __init__(self, argv: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-P", "-m", "batchscape.programs.guard", *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=folder,
                env=dict(environment),
                # Signals to the run's group do not reach it: it ends what they may leave.
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise LaunchError(f"the program cannot be started in {folder}: {error}") from None
        self._buffer = b""
        self.end: ProgramEnd | None = None
        """How it ended; None while it runs."""
        first_message = self._next(timeout_s=None)
        if first_message is None or "error" in first_message:
            self.close()
            problem = "its guard died" if first_message is None else first_message["error"]
            raise LaunchError(f"the program {argv[0]} cannot be started: {problem}")
        self.pid = int(first_message["pid"])
        """Process id of the program."""

    @property
    def guard_pid(self) -> int:
        """Process id of the guard, which all processes of the program are below."""
        return self._guard.pid

    def wait(self, timeout_s: float) -> ProgramEnd | None:
        """Wait for the end of all processes; None if it has not come in time."""
        if self.end is None and (message := self._next(timeout_s)) is not None:
            self.end = ProgramEnd(int(message["code"]), int(message["left"]))
        if self.end is None and self._guard.poll() is not None:
            # The guard was killed itself, and the program with it.
            self.end = ProgramEnd(-9, 0)
        return self.end

    def ask_to_end(self) -> None:
        """Ask the program to end, as the system does: SIGTERM."""
        self._tell(b"t")

    def kill(self) -> None:
        """End every process of it."""
        self._tell(b"k")

    def close(self) -> None:
        """Kill whatever is left, and wait for its end."""
        for pipe in (self._guard.stdin, self._guard.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._guard.wait()

    def _tell(self, letter: bytes) -> None:
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.write(letter)
                self._guard.stdin.flush()

    def _next(self, timeout_s: float | None) -> dict[str, Any] | None:
        """Return the guard's next message; None if there is none in time, or ever."""
        if self._guard.stdout is None:
            return None
        descriptor = self._guard.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], timeout_s)[0]:
                return None
            content = os.read(descriptor, 4096)
            if not content:
                return None
            self._buffer += content
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message
