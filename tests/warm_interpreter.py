"""Fork servers for sweeps of tests, forked from a process that has imported torch once.

Every sweep starts a fork server, which imports for seconds; tests start hundreds in one process.
What such a server does after its imports is the product's: this only gives it an interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from batchscape.launch.child import WORKER, WORKER_ENVIRONMENT, resolve
from batchscape.launch.forkserver import PRELOADED
from batchscape.launch.forkserver import main as serve_launcher

TRAINING = (*PRELOADED, WORKER.partition(":")[0])
"""What every rank imports."""
_PR_SET_CHILD_SUBREAPER = 36
"""prctl(2)"""
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from {module} import main; main()"
"""What the tests test is imported from where they import it, installed or not."""


class ForkedInterpreter:
    """What the launcher asks of the `Popen` of its fork server."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it lives."""
        return self._look(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._look(0 if deadline is None else os.WNOHANG)) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class WarmInterpreter:
    """The process from which they are forked."""

    def __init__(
        self, module: str = "warm_interpreter", environment: Mapping[str, str] | None = None
    ) -> None:
        self._channel, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far_end:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _BOOT.format(module=module)),
                    *(str(far_end.fileno()), *sys.path),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(far_end.fileno(),),
                env={**os.environ, **WORKER_ENVIRONMENT, **(environment or {})},
                start_new_session=True,
            )
        self.pid = self._process.pid

    def start_interpreter(
        self,
        module: str,
        arguments: tuple[str, str],
        descriptors: Iterable[int],
        *,
        stdin: int,
        output: IO[bytes],
        start_new_session: bool,
    ) -> ForkedInterpreter:
        """Do as `batchscape.launch.child.start_interpreter` does for a fork server."""
        assert (module, stdin, start_new_session) == ("forkserver", subprocess.DEVNULL, True)
        (channel,) = descriptors
        return self._fork(
            {
                "entry": arguments[1],
                "environment": {**os.environ, **WORKER_ENVIRONMENT},
                "folder": str(Path.cwd()),
            },
            [channel, output.fileno()],
        )

    def call(
        self,
        function: str,
        arguments: Sequence[str],
        *,
        output: IO[bytes],
        environment: Mapping[str, str],
        folder: Path,
        errors: IO[bytes] | None = None,
        reads: int | None = None,
    ) -> ForkedInterpreter:
        """Call the function that `module:function` names, with a list, in a process of its own.

        It reads the descriptor `reads`, and has nothing to read by default.
        """
        streams = [output.fileno(), (errors or output).fileno()]
        with Path(os.devnull).open("rb") as nothing:
            return self._fork(
                {
                    "function": function,
                    "arguments": list(arguments),
                    "environment": dict(environment),
                    "folder": str(folder),
                },
                [nothing.fileno() if reads is None else reads, *streams],
            )

    def _fork(self, request: dict[str, object], descriptors: Sequence[int]) -> ForkedInterpreter:
        request["path"] = [entry or str(Path.cwd()) for entry in sys.path]
        # The process that forks it ends at once; we become its parent.
        _adopt_orphans(True)
        try:
            message = json.dumps(request).encode()
            socket.send_fds(self._channel, [message], descriptors)
            return ForkedInterpreter(int(self._channel.recv(64)))
        finally:
            _adopt_orphans(False)

    def close(self) -> None:
        """End it; the servers live as long as their launchers."""
        self._channel.close()
        self._process.wait()


def _adopt_orphans(are_ours: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(are_ours), 0, 0, 0)


def _serve(channel: socket.socket, modules: Sequence[str]) -> None:
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            return
        receiver, sender = os.pipe()
        parent = os.fork()
        if parent == 0:
            os.write(sender, str(_fork_server(channel, json.loads(message), descriptors)).encode())
            os._exit(0)
        os.waitpid(parent, 0)
        channel.send(os.read(receiver, 64))
        for descriptor in (receiver, sender, *descriptors):
            os.close(descriptor)


def _fork_server(
    channel: socket.socket, request: dict[str, object], descriptors: Sequence[int]
) -> int:
    forked_by = os.getpid()
    pid = os.fork()
    if pid == 0:
        # A process may end with its parent, which is another one in a moment.
        while os.getppid() == forked_by:
            time.sleep(0.001)
        with contextlib.suppress(BaseException):
            _become_server(channel, request, descriptors)
        os._exit(1)
    return pid


def _become_server(
    channel: socket.socket, request: dict[str, Any], descriptors: Sequence[int]
) -> NoReturn:
    channel.close()
    os.setsid()
    if "function" in request:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    else:
        _, output = descriptors
        for number in (1, 2):
            os.dup2(output, number)
        os.close(output)
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    tempfile.tempdir = None
    if "function" not in request:
        serve_launcher(str(descriptors[0]), str(request["entry"]))
    resolve(str(request["function"]))(request["arguments"])
    os._exit(0)


def main(modules: Sequence[str] = TRAINING) -> None:
    """Be the process from which they are forked, with these modules imported."""
    _serve(socket.socket(fileno=int(sys.argv[1])), modules)
