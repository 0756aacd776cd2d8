"""The protocol of ways to start ranks, and the plain way: a fresh interpreter for each rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from batchscape.errors import LaunchError
from batchscape.launch.child import Start, start_interpreter
from batchscape.record.instants import now
from batchscape.record.status import RankExit

_POLL_S = 0.02
"""Time between looks at the processes."""


class Processes(Protocol):
    """A way of starting the ranks of runs. Every rank that was started is reported once."""

    method: str
    """`fork` or `spawn`."""
    note: str | None
    """What the user should know about the choice of the method."""

    def place(self) -> dict[str, Any]:
        """Return entries of `launch.json` about the nodes of the next run; none on one node.

        `nodes` are their names, and `master` is the address where the ranks meet, for torch.
        """
        return {}

    def start(self, start: Start, keep_open: Sequence[int] = ()) -> None:
        """Start one process for each rank, all in one new process group.

        Parameters
        ----------
        start : Start
        keep_open : sequence of int
            File descriptors that the ranks inherit: a lock then lasts as long as they do.

        Raises
        ------
        LaunchError
            If no process can be started.
        """

    def wait(self, timeout_s: float) -> list[RankExit]:
        """Return the ranks that have ended, as soon as there are any."""

    def signal(self, run: str, number: int) -> None:
        """Send a signal to all processes of a run that have not ended."""

    def close(self) -> None:
        """Kill all ranks and wait for their end."""


class Spawned(Processes):
    """Ranks started as fresh interpreters; each pays for its own imports, seconds."""

    method = "spawn"

    def __init__(self, note: str | None = None) -> None:
        self.note = note
        self._living: dict[str, dict[int, subprocess.Popen[bytes]]] = {}
        self._groups: dict[str, int] = {}
        # The ranks read one end of a pipe, and end when nobody holds the other.
        self._rank_end, self._launcher_end = os.pipe()

    def start(self, start: Start, keep_open: Sequence[int] = ()) -> None:
        """See `Processes`."""
        living = self._living[start.run] = {}
        for rank in start.numbers:
            try:
                with open(start.log, "ab") as log:  # noqa: PTH123  (a path as text, like the rest)
                    living[rank] = start_interpreter(
                        "child",
                        (json.dumps(asdict(start)), str(rank)),
                        keep_open,
                        stdin=self._rank_end,
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
            del self._living[ended.run][ended.rank]
            if not self._living[ended.run]:
                # Processes that the ranks have started in their group end with them.
                self._kill(ended.run)
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
        os.close(self._rank_end)
        os.close(self._launcher_end)

    def _kill(self, run: str) -> None:
        self.signal(run, signal.SIGKILL)
        self._groups.pop(run, None)
        for process in self._living.pop(run).values():
            process.wait()
