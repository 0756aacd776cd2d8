"""The launcher's side of starting ranks: forked from a warm server, or spawned one by one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from batchscape.launch.child import Start
from batchscape.launch.forked import Forked, UnsafeToForkError
from batchscape.launch.spawned import Spawned
from batchscape.record.outcome import RankExit

__all__ = ["Forked", "Processes", "Spawned", "open_processes"]


class Processes(Protocol):
    """A way of starting the ranks of runs. Every rank that was started is reported once."""

    method: str
    """`fork` or `spawn`."""
    note: str | None
    """What the user should know about the choice of it."""

    def place(self) -> dict[str, Any]:
        """Return what `launch.json` says of where the ranks of a next run are, on several nodes.

        `nodes` are their names, and `master` is where the ranks meet, as torch takes it.
        """

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
        """Return the ranks that have ended, at once when there are any."""

    def signal(self, run: str, number: int) -> None:
        """Send a signal to all processes of a run; none if they have ended."""

    def close(self) -> None:
        """Kill whatever still runs and wait for its end."""


def open_processes(
    entry: str,
    should_stop: Callable[[], bool],
    method: str | None,
    also_preload: str = "",
) -> Processes | None:
    """Choose and prepare the way of starting ranks.

    Parameters
    ----------
    entry : str
        What the ranks will call; preloaded where they are forked.
    should_stop : callable
        Asked while the fork server boots.
    method : str or None
        `fork` or `spawn`; None: fork where that is safe.
    also_preload : str
        Module that a fork server imports beside the usual ones; empty: none.

    Returns
    -------
    Processes or None
        None if `should_stop` said so.

    Raises
    ------
    LaunchError
        If the fork server cannot boot, or forking was asked for and is unsafe.
    """
    if method is None:
        method = "fork" if sys.platform == "linux" else "spawn"
    if method == "spawn":
        return Spawned()
    server = Forked(entry, also_preload)
    try:
        while not server.is_ready(0.1):
            if should_stop():
                server.close()
                return None
    except UnsafeToForkError as error:
        server.close()
        return Spawned(f"every rank imports for itself, which takes seconds: {error}")
    except BaseException:
        server.close()
        raise
    return server
