"""Ranks forked by a warm server, which has imported everything: both ends of its socket.

The server is started once a sweep. A message in is a run to start, or a signal for the process
group of a run. The first message out says that the server is ready, each other one that a rank has
ended. When the socket closes, all groups are killed and the server ends; when the server ends, its
ranks die with it.

Forking is only safe from a process with one thread and without a CUDA context, so the server
imports but never computes, and reports when that was not enough. Linux only: it needs
`PR_SET_PDEATHSIG` and `/proc`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import psutil

from batchscape.errors import LaunchError
from batchscape.launch.child import (
    WORKER,
    Start,
    live,
    start_interpreter,
)
from batchscape.launch.processes import Processes, ShouldStop, Spawned
from batchscape.record.instants import now
from batchscape.record.status import RankExit
from batchscape.system import adopt_orphans, die_first, end_with_parent, threads

_BOOT_LIMIT_S = 600.0
"""Longest time for a new server to import everything; a slow file system takes a minute or two."""

_MOST_DESCRIPTORS = 250
"""Locks of one run that a server takes; the system passes 253 in one message."""


class _UnsafeToForkError(LaunchError):
    """The fork server has threads or a CUDA context, which its children cannot use."""


class ServerError(LaunchError):
    """There is no fork server, so that no run can be started."""


class ServerKilledError(ServerError):
    """The machine lets no fork server live; the settings of the runs are not the cause."""


class Forked(Processes):
    """Ranks forked by a server process that has imported everything, in milliseconds."""

    method = "fork"

    def __init__(self, preload: str) -> None:
        self.note: str | None = None
        self._preload = preload
        self._living_ranks: set[tuple[str, int]] = set()
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
                (str(far_end.fileno()), self._preload),
                (far_end.fileno(),),
                stdin=subprocess.DEVNULL,
                output=self._errors,
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
                if (code := self._server.wait()) < 0:
                    raise ServerKilledError(
                        f"the fork server was killed by signal {-code} while it imported; look at "
                        "the machine's memory"
                    )
                raise ServerError(f"the fork server ended with code {code}:\n{self._printed()}")
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
                raise ServerKilledError(
                    f"the fork server cannot be started again: {error}"
                ) from None
        deadline = time.monotonic() + _BOOT_LIMIT_S
        while not self.is_ready(1.0):
            if time.monotonic() > deadline:
                raise ServerError(f"the fork server has not booted within {_BOOT_LIMIT_S:g} s")
        ranks = {(start.run_id, rank) for rank in start.rank_numbers}
        self._living_ranks |= ranks
        try:
            # The first locks matter most; the launcher holds all of them anyway.
            self._send(asdict(start), keep_open[:_MOST_DESCRIPTORS])
        except OSError as error:
            # The message was not sent: nobody will report the end of these ranks.
            self._living_ranks -= ranks
            raise LaunchError(
                f"{start.run_id} cannot be handed to the fork server: {error}"
            ) from None

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
            if "run_id" in message:
                rank_exit = RankExit(**message)
                self._living_ranks.discard((rank_exit.run_id, rank_exit.rank))
                exits.append(rank_exit)
        return exits

    def signal(self, run_id: str, signal_number: int) -> None:
        """See `Processes`."""
        self._send({"run_id": run_id, "signal": int(signal_number)})

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
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self._server.pid:
                    process.kill()
        code = self._server.wait()
        at = now()
        end_text = (
            f"killed by signal {-code}" if code < 0 else f"exit code {code}: {self._printed()}"
        )
        outside_cause = f"the fork server died ({end_text}), and the ranks of the run with it"
        exits = [
            RankExit(run_id, rank, -signal.SIGKILL, at, outside_cause)
            for run_id, rank in sorted(self._living_ranks)
        ]
        self._living_ranks.clear()
        return exits

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
        with suppress(ConnectionError):
            socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors)


def open_processes(
    preload: str, should_stop: ShouldStop, *, method: str | None = None
) -> Processes | None:
    """Choose and prepare the way of starting ranks.

    Parameters
    ----------
    preload : str
        Entry point of the ranks, and perhaps modules, separated by spaces; a fork server imports
        them beside the usual ones.
    should_stop : callable
        Called while the fork server boots.
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
    if (method or ("fork" if sys.platform == "linux" else "spawn")) == "spawn":
        return Spawned()
    with ExitStack() as cleanup:
        server = Forked(preload)
        cleanup.callback(server.close)
        try:
            while not should_stop():
                if server.is_ready(0.1):
                    cleanup.pop_all()
                    return server
        except _UnsafeToForkError as error:
            return Spawned(f"every rank imports for itself, which takes seconds: {error}")
    return None


PRELOADED = (
    "numpy",
    "pydantic",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    # The first optimizer of a process imports it, for a second or two.
    "torch._dynamo",
)
"""Modules that every rank needs, slow to import."""


def main(channel: str, preload: str) -> NoReturn:
    """Preload, report, and serve until the launcher is gone.

    Parameters
    ----------
    channel : str
        File descriptor of a connected SOCK_SEQPACKET socket.
    preload : str
        As `open_processes` takes it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The launcher obeys the signals; the server lives and dies with the socket.
        signal.signal(number, signal.SIG_IGN)
    _import_ahead(preload)
    server = _ForkServer(socket.socket(fileno=int(channel)))
    server.serve()
    os._exit(0)


def _import_ahead(preload: str) -> None:
    # Imports make no garbage; looking for it takes a fifth of their time.
    gc.disable()
    # The watcher of a program needs none of them.
    entry, *modules = preload.split(" ")
    for name in PRELOADED if entry == WORKER else ():
        importlib.import_module(name)
    # Our own modules take a fifth of a second, mostly pydantic's schemas; and the whole sweep
    # then runs one version of the code, whatever is edited meanwhile.
    for name in (entry.partition(":")[0], *modules):
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  (each rank meets it again, and its run's log shows it)
            traceback.print_exc()
    # All that is loaded stays in use: keep the collector off the shared pages.
    gc.collect()
    gc.freeze()
    gc.enable()


def _why_unsafe_to_fork() -> str | None:
    if (other_threads := threads() - 1) > 0:
        return f"importing the training libraries started {other_threads} more native threads"
    if "torch" not in sys.modules:
        return None
    # A child of a process that has woken the CUDA driver cannot use it; only a child can tell.
    cuda = importlib.import_module("torch.cuda")
    child_pid = os.fork()
    if child_pid == 0:
        os._exit(int(cuda._is_in_bad_fork()))
    if cuda.is_initialized() or os.waitpid(child_pid, 0)[1]:
        return "importing the training libraries initialised CUDA"
    return None


class _ForkServer:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._leader_by_run: dict[str, int] = {}
        """Number of the process group of each run; no other group can have it until its last member
        is reaped."""
        self._rank_by_pid: dict[int, tuple[str, int]] = {}
        """Run and rank of each living process."""
        self._pid = os.getpid()
        # Processes that a rank leaves become children of the server, which kills them.
        adopt_orphans()

    def serve(self) -> None:
        """Answer until the launcher closes its end or dies."""
        self._send(unsafe=_why_unsafe_to_fork())
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            readable, _, _ = select.select([self._channel, self._wake_receiver], [], [])
            if self._wake_receiver in readable:
                self._wake_receiver.recv(4096)
                self._reap()
            if self._channel in readable and not self._answer():
                break
        for leader in self._leader_by_run.values():
            os.killpg(leader, signal.SIGKILL)
        _kill_descendants()
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _answer(self) -> bool:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 20, _MOST_DESCRIPTORS)
        except ConnectionError:
            return False
        if not message:
            return False
        request = json.loads(message)
        if "signal" in request:
            if (leader := self._leader_by_run.get(request["run_id"])) is not None:
                os.killpg(leader, request["signal"])
        else:
            self._start(Start(**request))
        for descriptor in descriptors:
            # The ranks inherit the locks; the server gives them up.
            os.close(descriptor)
        return True

    def _start(self, start: Start) -> None:
        # A signal for a rank must wait until the rank has stopped ignoring it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        for rank in start.rank_numbers:
            try:
                pid = os.fork()
            except OSError as error:
                # The disk may be full as well, and there are other runs.
                with suppress(OSError), Path(start.log).open("a") as log:
                    log.write(f"batchscape: cannot fork: {error}\n")
                outside_cause = f"rank {rank} could not be forked: {error}"
                self._send(
                    run_id=start.run_id, rank=rank, code=1, outside_cause=outside_cause, at=now()
                )
                continue
            if pid == 0:
                self._become_rank(start, rank, self._leader_by_run.get(start.run_id, 0), mask)
            self._rank_by_pid[pid] = start.run_id, rank
            leader = self._leader_by_run.setdefault(start.run_id, pid)
            # The child does the same; whichever is first, neither goes on outside of the group.
            with suppress(OSError):
                os.setpgid(pid, leader)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _become_rank(self, start: Start, rank: int, leader: int, mask: set[Any]) -> NoReturn:
        try:
            os.setpgid(0, leader)
            end_with_parent()
            if os.getppid() != self._pid:
                os._exit(1)
            # Where memory runs out, the system should pick a rank before the launcher.
            with suppress(OSError):
                die_first()
            # The launcher must see the socket close when the server alone has died.
            for end in (self._channel, self._wake_receiver, self._wake_sender):
                end.close()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            live(start, rank)
        finally:
            # Whatever went wrong, a rank never returns into the server's code.
            os._exit(1)

    def _reap(self) -> None:
        """Report every rank that has ended."""
        while True:
            try:
                # Look before reaping: the group's number is safe to use while a member remains.
                wait_result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if wait_result is None:
                return
            pid, at = wait_result.si_pid, now()
            run_id, rank = self._rank_by_pid.pop(pid, ("", 0))
            is_last = bool(run_id) and all(run != run_id for run, _ in self._rank_by_pid.values())
            if is_last:
                os.killpg(self._leader_by_run.pop(run_id), signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if is_last and not self._leader_by_run:
                _kill_descendants()
            if run_id:
                self._send(run_id=run_id, rank=rank, code=code, at=at)

    def _send(self, **message: object) -> None:
        # `serve` notices a launcher that is gone when it waits for the next message.
        with suppress(ConnectionError):
            self._channel.send(json.dumps(message).encode())


def _kill_descendants() -> None:
    """Kill the processes that ranks started in groups of their own."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
