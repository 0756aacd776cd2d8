"""A running program, held by a guard that ends all of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchscape.errors import LaunchError

__all__ = ["Ended", "Program"]


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int
    """Exit code; negative: the signal that killed it."""
    left: int
    """Processes that it left behind, which were killed."""


class Program:
    """A program and every process that it starts.

    Parameters
    ----------
    argv : sequence of str
        The program and its arguments; no shell.
    folder : Path
        Where it starts.
    environment : mapping of str to str
        Its whole environment.

    Raises
    ------
    LaunchError
        If it cannot be started; the message says why.
    """

    def __init__(self, argv: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-P", "-m", "batchscape.programs.guard", *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=folder,
                env=dict(environment),
                # Out of reach of signals to the run's group: it ends what those may leave.
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            msg = f"the program cannot be started in {folder}: {error}"
            raise LaunchError(msg) from None
        self._buffer = b""
        self.ended: Ended | None = None
        """How it ended; None while it runs."""
        first = self._next(timeout_s=None)
        if first is None or "error" in first:
            self.close()
            told = "its guard died" if first is None else first["error"]
            msg = f"the program {argv[0]} cannot be started: {told}"
            raise LaunchError(msg)
        self.pid = int(first["pid"])
        """Process id of the program."""

    @property
    def guard_pid(self) -> int:
        """Process id of the guard, which all processes of the program are below."""
        return self._guard.pid

    def wait(self, timeout_s: float) -> Ended | None:
        """Wait for the end of all processes; None if it has not come in time."""
        if self.ended is None and (message := self._next(timeout_s)) is not None:
            self.ended = Ended(int(message["code"]), int(message["left"]))
        if self.ended is None and self._guard.poll() is not None:
            # The guard was killed itself, and the program with it.
            self.ended = Ended(-9, 0)
        return self.ended

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
