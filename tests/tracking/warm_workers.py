"""Processes that talk to W&B for tests, forked from one that has imported its library once.

A process imports it for two seconds; tests start one for each mirror or sync. What it does after
its imports is the product's. Those that another process starts, as `batchscape sync` does, are
started as ever.
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
from pathlib import Path
from typing import IO, NoReturn

from warm_interpreter import ForkedInterpreter

WORKER = "batchscape.tracking.worker"
_BOOT = "import sys; sys.path[:] = sys.argv[3:]; from warm_workers import main; main()"
_PR_SET_CHILD_SUBREAPER = 36
"""prctl(2)"""


class ForkedWorker(ForkedInterpreter):
    """What a mirror asks of the `Popen` of its process."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        super().__init__(pid)
        self.stdin = stdin


class WarmWorkers:
    """The process from which they are forked."""

    def __init__(self) -> None:
        self._channel, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far_end:
            self._process = subprocess.Popen(
                # Its name, for those who look for a worker by its command line.
                [sys.executable, "-c", _BOOT, str(far_end.fileno()), WORKER, *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=(far_end.fileno(),),
                start_new_session=True,
            )
        self.pid = self._process.pid

    def start(
        self,
        command: list[str],
        *,
        stdin: int,
        bufsize: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        env: dict[str, str],
        start_new_session: bool,
    ) -> ForkedWorker:
        """Do as `subprocess.Popen` does for the process of a mirror."""
        assert command[:-1] == [sys.executable, "-P", "-m", WORKER]
        assert (stdin, bufsize, start_new_session) == (subprocess.PIPE, 0, True)
        request = {"order": command[-1], "environment": env, "folder": str(Path.cwd())}
        reading, writing = os.pipe()
        # The process that forks it ends at once; we become its parent.
        _adopt_orphans(True)
        try:
            descriptors = [reading, stdout.fileno(), stderr.fileno()]
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
            pid = int(self._channel.recv(64))
        finally:
            _adopt_orphans(False)
            os.close(reading)
        return ForkedWorker(pid, os.fdopen(writing, "wb", buffering=0))

    def close(self) -> None:
        """End it; its workers are over by then."""
        self._channel.close()
        self._process.wait()


def _adopt_orphans(are_ours: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(are_ours), 0, 0, 0)


def _serve(channel: socket.socket) -> None:
    gc.disable()
    importlib.import_module(WORKER)
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
            forked_by = os.getpid()
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    _become_worker(json.loads(message), descriptors, forked_by)
                os._exit(1)
            os.write(sender, str(pid).encode())
            os._exit(0)
        os.waitpid(parent, 0)
        channel.send(os.read(receiver, 64))
        for descriptor in (receiver, sender, *descriptors):
            os.close(descriptor)


def _become_worker(request: dict[str, str], descriptors: list[int], forked_by: int) -> NoReturn:
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    # A worker ends with its parent, which is another one in a moment.
    while os.getppid() == forked_by:
        time.sleep(0.001)
    importlib.import_module(WORKER).main(request["order"])
    os._exit(0)


def main() -> None:
    """Be the process from which they are forked."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _serve(socket.socket(fileno=int(sys.argv[1])))
