"""Ranks started as fresh interpreters, where forking is not possible or not safe."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from batchscape.errors import LaunchError
from batchscape.launch.child import Start, start_interpreter
from batchscape.record.instants import now
from batchscape.record.outcome import RankExit

__all__ = ["Spawned"]

_POLL_S = 0.02
"""Time between looks at the processes."""


class Spawned:
    """Ranks started as fresh interpreters; each pays for its own imports, seconds."""

    method = "spawn"

    def __init__(self, note: str | None = None) -> None:
        self.note = note
        self._living: dict[str, dict[int, subprocess.Popen[bytes]]] = {}
        self._groups: dict[str, int] = {}

    def place(self) -> dict[str, Any]:
        """See `Processes`: this machine."""
        return {}

    def start(self, start: Start, keep_open: Sequence[int] = ()) -> None:
        """See `Processes`."""
        living = self._living[start.run] = {}
        for rank in start.numbers:
            try:
                with open(start.log, "ab") as log:  # noqa: PTH123  (a path as text, like the rest)
                    living[rank] = start_interpreter(
                        "child",
                        (start.to_json(), str(rank)),
                        keep_open,
                        stdin=subprocess.PIPE,
                        output=log,
                        environment=start.environment,
                        process_group=self._groups.get(start.run, 0),
                    )
            except OSError as error:
                self._kill(start.run)
                msg = f"rank {rank} of {start.run} cannot be started: {error}"
                raise LaunchError(msg) from None
            self._groups.setdefault(start.run, living[rank].pid)

    def wait(self, timeout_s: float) -> list[RankExit]:
        """See `Processes`."""
        deadline = time.monotonic() + timeout_s
        while True:
            exits = [
                RankExit(run, rank, process.returncode, now())
                for run, living in self._living.items()
                for rank, process in living.items()
                if process.poll() is not None
            ]
            if exits or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        for ended in exits:
            self._forget(ended)
        return exits

    def signal(self, run: str, number: int) -> None:
        """See `Processes`."""
        if run in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._groups[run], number)

    def close(self) -> None:
        """See `Processes`."""
        for run in list(self._living):
            self._kill(run)

    def _forget(self, ended: RankExit) -> None:
        living = self._living[ended.run]
        _close_input(living.pop(ended.rank))
        if not living:
            # What the ranks have started in their group ends with them.
            self._kill(ended.run)

    def _kill(self, run: str) -> None:
        self.signal(run, signal.SIGKILL)
        self._groups.pop(run, None)
        for process in self._living.pop(run).values():
            process.wait()
            _close_input(process)


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
