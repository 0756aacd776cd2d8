"""The protocol of ways to start ranks, and the plain way: a fresh interpreter for each rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

from batchscape.errors import LaunchError
from batchscape.launch.child import Start, start_interpreter
from batchscape.record.instants import now
from batchscape.record.status import RankExit

ShouldStop = Callable[[], bool]
"""Returns whether the launch is to stop; called while processes boot."""
_POLL_S = 0.02
"""Time between looks at the processes."""


class Processes(Protocol):
    """A way of starting the ranks of runs. Every rank that was started is reported once."""

    method: str
    """`fork` or `spawn`."""
    note: str | None
    """What the user should know about the choice of the method."""

    def node_entries(self) -> dict[str, Any]:
        """Return the entries of `launch.json` about the nodes of the next run; empty on one node.

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

    def signal(self, run_id: str, signal_number: int) -> None:
        """Send a signal to all processes of a run that have not ended."""

    def close(self) -> None:
        """Kill all ranks and wait for their end."""


class Spawned(Processes):
    """Ranks started as fresh interpreters; each pays for its own imports, seconds."""

    method = "spawn"

    def __init__(self, note: str | None = None) -> None:
        self.note = note
        self._processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._groups: dict[str, int] = {}
        # The ranks read one end of a pipe, and end when nobody holds the other.
        self._rank_end, self._launcher_end = os.pipe()

    def start(self, start: Start, keep_open: Sequence[int] = ()) -> None:
        """See `Processes`."""
        for rank in start.rank_numbers:
            try:
                with open(start.log, "ab") as log:  # noqa: PTH123  (a path as text, like the rest)
                    process = self._processes[start.run_id, rank] = start_interpreter(
                        "child",
                        (json.dumps(asdict(start)), str(rank)),
                        keep_open,
                        stdin=self._rank_end,
                        output=log,
                        environment=start.environment,
                        process_group=self._groups.get(start.run_id, 0),
                    )
            except OSError as error:
                self._kill(start.run_id)
                raise LaunchError(
                    f"rank {rank} of {start.run_id} cannot be started: {error}"
                ) from None
            self._groups.setdefault(start.run_id, process.pid)

    def wait(self, timeout_s: float) -> list[RankExit]:
        """See `Processes`."""
        deadline = time.monotonic() + timeout_s
        while True:
            exits = [
                RankExit(run_id, rank, process.returncode, now())
                for (run_id, rank), process in self._processes.items()
                if process.poll() is not None
            ]
            if exits or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        for rank_exit in exits:
            del self._processes[rank_exit.run_id, rank_exit.rank]
            if all(run_id != rank_exit.run_id for run_id, _ in self._processes):
                # Processes that the ranks have started in their group end with them.
                self._kill(rank_exit.run_id)
        return exits

    def signal(self, run_id: str, signal_number: int) -> None:
        """See `Processes`."""
        if run_id in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(self._groups[run_id], signal_number)

    def close(self) -> None:
        """See `Processes`."""
        for run_id in list(self._groups):
            self._kill(run_id)
        os.close(self._rank_end)
        os.close(self._launcher_end)

    def _kill(self, run_id: str) -> None:
        self.signal(run_id, signal.SIGKILL)
        self._groups.pop(run_id, None)
        for key in [key for key in self._processes if key[0] == run_id]:
            self._processes.pop(key).wait()
