"""Ranks forked by a warm server, where that is safe, and the choice between that and spawning."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import psutil

from batchscape.errors import LaunchError
from batchscape.launch.child import (
    ALSO_PRELOADED,
    MOST_DESCRIPTORS,
    Start,
    start_interpreter,
)
from batchscape.launch.processes import Processes, Spawned
from batchscape.record.instants import now
from batchscape.record.status import RankExit

_BOOT_LIMIT_S = 600.0
"""Longest time for a new server to import everything; a slow file system takes a minute or two."""


class _UnsafeToForkError(LaunchError):
    """The fork server has threads or a CUDA context, which its children cannot use."""


class ServerError(LaunchError):
    """There is no fork server, so that no run can be started."""


class ServerKilledError(ServerError):
    """The machine lets no fork server live; the settings of the runs are not the cause."""


class Forked(Processes):
    """Ranks forked by a server process that has imported everything, in milliseconds."""

    method = "fork"

    def __init__(self, entry: str, also_preload: str = "") -> None:
        self.note: str | None = None
        self._entry = entry
        self._also_preload = also_preload
        self._living: dict[str, set[int]] = {}
        self._unreported: list[RankExit] = []
        self._boot()

    def _boot(self) -> None:
        self._channel, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the server)
        self._ready = False
        self._is_gone = False
        with far_end:
            self._server = start_interpreter(
                "forkserver",
                (str(far_end.fileno()), self._entry),
                (far_end.fileno(),),
                stdin=subprocess.DEVNULL,
                output=self._errors,
                environment={ALSO_PRELOADED: self._also_preload},
                # Out of the terminal's reach: Ctrl-C is the launcher's to interpret.
                start_new_session=True,
            )

    def is_ready(self, timeout_s: float) -> bool:
        """Return whether the server has booted, waiting for it at most `timeout_s` seconds.

        Raises
        ------
        ServerError
            If it died instead.
        _UnsafeToForkError
            If it booted and must not fork.
        """
        if not self._ready and self._readable(timeout_s):
            message = self._receive()
            if message is None:
                code, printed = self._server.wait(), self._printed()
                if code < 0:
                    msg = (
                        f"the fork server was killed by signal {-code} while it imported; look at "
                        "the machine's memory"
                    )
                    raise ServerKilledError(msg)
                msg = f"the fork server ended with code {code}:\n{printed}"
                raise ServerError(msg)
            if message["unsafe"]:
                raise _UnsafeToForkError(str(message["unsafe"]))
            self._ready = True
        return self._ready

    def start(self, start: Start, keep_open: Sequence[int] = ()) -> None:
        """See `Processes`; a server that has died is replaced.

        Raises
        ------
        ServerError
            If there can be no other.
        """
        if self._server.poll() is not None:
            # The next `wait` reports the ranks that it had started.
            while not self._is_gone:
                self._unreported = self.wait(0.1)
            self._channel.close()
            self._errors.close()
            try:
                self._boot()
            except OSError as error:
                msg = f"the fork server cannot be started again: {error}"
                raise ServerKilledError(msg) from None
        deadline = time.monotonic() + _BOOT_LIMIT_S
        while not self.is_ready(1.0):
            if time.monotonic() > deadline:
                msg = f"the fork server has not booted within {_BOOT_LIMIT_S:g} s"
                raise ServerError(msg)
        self._living[start.run] = set(start.numbers)
        try:
            # The first locks matter most; the launcher holds all of them anyway.
            self._send(asdict(start), keep_open[:MOST_DESCRIPTORS])
        except OSError as error:
            # The message was not sent: nobody will report the end of these ranks.
            del self._living[start.run]
            msg = f"{start.run} cannot be handed to the fork server: {error}"
            raise LaunchError(msg) from None

    def wait(self, timeout_s: float) -> list[RankExit]:
        """See `Processes`."""
        exits, self._unreported = self._unreported, []
        if self._is_gone:
            # A closed channel is always readable: `select` would not wait.
            time.sleep(0 if exits else timeout_s)
            return exits
        while self._readable(0 if exits else timeout_s):
            message = self._receive()
            if message is None:
                return exits + self._bury_all()
            if "run" in message:
                ended = RankExit(**message)
                self._living[ended.run].discard(ended.rank)
                exits.append(ended)
        return exits

    def signal(self, run: str, number: int) -> None:
        """See `Processes`."""
        self._send({"run": run, "signal": int(number)})

    def close(self) -> None:
        """See `Processes`."""
        self._channel.close()
        if not self._ready:
            # It is importing, has no ranks, and would notice the close only afterwards.
            self._server.kill()
        self._server.wait()
        self._errors.close()

    def _bury_all(self) -> list[RankExit]:
        """Report the ranks of a dead server: the system has killed them with it."""
        self._is_gone = True
        # Processes that the ranks have started survive the server; all are in its session.
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self._server.pid:
                    process.kill()
        code = self._server.wait()
        at = now()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}: {self._printed()}"
        lost = f"the fork server died ({how}), and the ranks of the run with it"
        ended = [
            RankExit(run, rank, -signal.SIGKILL, at, lost)
            for run, ranks in self._living.items()
            for rank in sorted(ranks)
        ]
        self._living.clear()
        return ended

    def _printed(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def _readable(self, timeout_s: float) -> bool:
        return bool(select.select([self._channel], [], [], timeout_s)[0])

    def _receive(self) -> dict[str, Any] | None:
        try:
            message = self._channel.recv(1 << 20)
        except ConnectionError:
            return None
        return json.loads(message) if message else None

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors)


def open_processes(
    entry: str,
    should_stop: Callable[[], bool],
    also_preload: str = "",
    *,
    method: str | None = None,
) -> Processes | None:
    """Choose and prepare the way of starting ranks.

    Parameters
    ----------
    entry : str
        Entry point of the ranks; preloaded where they are forked.
    should_stop : callable
        Called while the fork server boots.
    also_preload : str
        Module that a fork server imports beside the usual ones; empty: none.
    method : str, optional
        `fork` or `spawn`; by default fork where that is safe.

    Returns
    -------
    Processes or None
        None if `should_stop` returned True.

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
        while not should_stop():
            if server.is_ready(0.1):
                return server
    except _UnsafeToForkError as error:
        server.close()
        return Spawned(f"every rank imports for itself, which takes seconds: {error}")
    except BaseException:
        server.close()
        raise
    server.close()
    return None
