"""The launcher's side of starting ranks: forked from a warm server, or spawned one by one."""

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
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from batchscape.errors import LaunchError
from batchscape.launch.child import BOOT, WORKER_ENVIRONMENT, Start

__all__ = ["Forked", "Processes", "RankExit", "Spawned", "open_processes"]

_POLL_S = 0.02
"""Time between looks at spawned processes."""


@dataclass(frozen=True)
class RankExit:
    """One rank's process has ended."""

    run: str
    rank: int
    code: int
    """Exit code; negative: the signal that killed it."""
    at: float
    """When it was noticed, in seconds since the epoch."""


class Processes(Protocol):
    """A way of starting the ranks of runs. Every rank that was started is reported once."""

    method: str
    """`fork` or `spawn`."""

    def start(self, start: Start) -> None:
        """Start one process for each rank, all in one new process group.

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
    target: str, keep_open: tuple[int, ...], should_stop: Callable[[], bool], method: str | None
) -> Processes | None:
    """Choose and prepare the way of starting ranks.

    Parameters
    ----------
    target : str
        What the ranks will call; preloaded where they are forked.
    keep_open : tuple of int
        File descriptors that the processes inherit: a lock then lasts as long as they do.
    should_stop : callable
        Asked while the fork server boots.
    method : str or None
        `fork` or `spawn`; None: fork where that is safe.

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
        return Spawned(keep_open)
    server = Forked(target, keep_open)
    try:
        while not server.is_ready(0.1):
            if should_stop():
                server.close()
                return None
    except UnsafeToForkError:
        server.close()
        return Spawned(keep_open)
    except BaseException:
        server.close()
        raise
    return server


class UnsafeToForkError(LaunchError):
    """The fork server has threads or a CUDA context, which its children could not use."""


class Forked:
    """Ranks forked by a server process that has imported everything, in milliseconds."""

    method = "fork"

    def __init__(self, target: str, keep_open: tuple[int, ...] = ()) -> None:
        self._target = target
        self._keep_open = keep_open
        self._living: dict[str, set[int]] = {}
        self._groups: dict[str, int] = {}
        self._boot()

    def _boot(self) -> None:
        self._channel, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()
        self._ready = False
        with far_end:
            descriptors = (far_end.fileno(), *self._keep_open)
            self._server = _python(
                "forkserver",
                (str(far_end.fileno()), self._target),
                descriptors,
                stdin=subprocess.DEVNULL,
                output=self._errors,
                # Out of the terminal's reach: Ctrl-C is the launcher's to interpret.
                start_new_session=True,
            )

    def is_ready(self, timeout_s: float) -> bool:
        """Return whether the server has booted, waiting for it at most `timeout_s` seconds.

        Raises
        ------
        LaunchError
            If it died instead.
        UnsafeToForkError
            If it booted and must not fork.
        """
        if not self._ready and self._readable(timeout_s):
            message = self._receive()
            if message is None:
                self._errors.seek(0)
                printed = self._errors.read().decode(errors="replace").strip()
                msg = f"the fork server ended with code {self._server.wait()}:\n{printed}"
                raise LaunchError(msg)
            if message["unsafe"]:
                raise UnsafeToForkError(str(message["unsafe"]))
            self._ready = True
        return self._ready

    def start(self, start: Start) -> None:
        """See `Processes`; a server that has died is replaced."""
        if self._server.poll() is not None:
            self._channel.close()
            self._errors.close()
            self._boot()
        while not self.is_ready(1.0):
            pass
        self._living[start.run] = set(range(start.ranks))
        self._send(asdict(start))

    def wait(self, timeout_s: float) -> list[RankExit]:
        """See `Processes`."""
        exits: list[RankExit] = []
        while self._readable(0 if exits else timeout_s):
            message = self._receive()
            if message is None:
                return exits + self._bury_all()
            if message["event"] == "started" and message["group"] is not None:
                self._groups[message["run"]] = message["group"]
            elif message["event"] == "exit":
                del message["event"]
                exits.append(self._note(RankExit(**message)))
        return exits

    def signal(self, run: str, number: int) -> None:
        """See `Processes`."""
        self._send({"run": run, "signal": int(number)})

    def close(self) -> None:
        """See `Processes`."""
        self._channel.close()
        self._server.wait()
        self._errors.close()

    def _note(self, ended: RankExit) -> RankExit:
        self._living[ended.run].discard(ended.rank)
        if not self._living[ended.run]:
            del self._living[ended.run]
            self._groups.pop(ended.run, None)
        return ended

    def _bury_all(self) -> list[RankExit]:
        """Report the ranks of a dead server: the system has killed them with it."""
        self._server.wait()
        for group in self._groups.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        now = time.time()
        ended = [
            RankExit(run, rank, -signal.SIGKILL, now)
            for run, ranks in self._living.items()
            for rank in sorted(ranks)
        ]
        self._living.clear()
        self._groups.clear()
        return ended

    def _readable(self, timeout_s: float) -> bool:
        return bool(select.select([self._channel], [], [], timeout_s)[0])

    def _receive(self) -> dict[str, Any] | None:
        try:
            message = self._channel.recv(1 << 20)
        except ConnectionError:
            return None
        return json.loads(message) if message else None

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):
            self._channel.send(json.dumps(message).encode())


class Spawned:
    """Ranks started as fresh interpreters; each pays for its own imports, seconds."""

    method = "spawn"

    def __init__(self, keep_open: tuple[int, ...] = ()) -> None:
        self._keep_open = keep_open
        self._living: dict[str, dict[int, subprocess.Popen[bytes]]] = {}
        self._groups: dict[str, int] = {}

    def start(self, start: Start) -> None:
        """See `Processes`."""
        living = self._living[start.run] = {}
        for rank in range(start.ranks):
            try:
                with open(start.log, "ab") as log:  # noqa: PTH123  (a path as text, like the rest)
                    living[rank] = _python(
                        "child",
                        (start.to_json(), str(rank)),
                        self._keep_open,
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
                RankExit(run, rank, process.returncode, time.time())
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


def _python(
    module: str,
    arguments: tuple[str, str],
    descriptors: Iterable[int],
    *,
    stdin: int,
    output: IO[bytes],
    environment: dict[str, str] | None = None,
    start_new_session: bool = False,
    process_group: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start `main` of a module of this package in a fresh interpreter."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            BOOT.format(module=module),
            *arguments,
            *(entry or str(Path.cwd()) for entry in sys.path),
        ],
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **WORKER_ENVIRONMENT, **(environment or {})},
        pass_fds=tuple(descriptors),
        start_new_session=start_new_session,
        process_group=process_group,
    )
