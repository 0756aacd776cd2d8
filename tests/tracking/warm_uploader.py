"""Processes that talk to W&B, forked from one that has imported wandb once.

Every mirror and every sync starts one, which imports for seconds. What it does after its imports
is the product's: this only gives it an interpreter.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from warm_interpreter import ForkedInterpreter, _adopt_orphans

_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from warm_uploader import main; main()"
_COMMAND = ["-P", "-m", "batchscape.tracking.worker"]


class ForkedUploader(ForkedInterpreter):
    """What the mirror asks of the `Popen` of its worker."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        super().__init__(pid)
        self.stdin = stdin


class WarmUploader:
    """The process from which they are forked."""

    def __init__(self) -> None:
        self._channel, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self.started: list[int] = []
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(far_end.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=(far_end.fileno(),),
                env=os.environ | {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"},
                start_new_session=True,
            )

    def popen(
        self,
        command: list[str],
        *,
        stdin: int,
        bufsize: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> ForkedUploader | subprocess.Popen[bytes]:
        """Do as `subprocess.Popen` does for a worker of a mirror."""
        if "PYTHONPATH" in env:  # it may lead to another wandb
            return subprocess.Popen(
                command,
                stdin=stdin,
                bufsize=bufsize,
                stdout=stdout,
                stderr=stderr,
                env=env,
                start_new_session=start_new_session,
            )
        assert command[:4] == [sys.executable, *_COMMAND]
        assert (stdin, bufsize, start_new_session) == (subprocess.PIPE, 0, True)
        read, write = os.pipe()
        request = {
            "text": command[4],
            "environment": dict(env),
            "folder": str(Path.cwd()),
            "parent": os.getpid(),
        }
        with self._lock:
            # The process that forks it ends at once; we become its parent.
            _adopt_orphans(True)
            try:
                descriptors = [read, stdout.fileno(), stderr.fileno()]
                socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
                pid = int(self._channel.recv(64))
            finally:
                _adopt_orphans(False)
        os.close(read)
        self.started.append(pid)
        return ForkedUploader(pid, os.fdopen(write, "wb", buffering=0))

    def close(self) -> None:
        """End it."""
        self._channel.close()
        self._process.wait()


def main() -> None:
    """Be the process from which they are forked."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    importlib.import_module("batchscape.tracking.worker")
    gc.collect()
    gc.freeze()
    gc.enable()
    assert threading.active_count() == 1
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            return
        receiver, sender = os.pipe()
        parent = os.fork()
        if parent == 0:
            pid = os.fork()
            if pid == 0:
                _work(channel, json.loads(message), descriptors)
            os.write(sender, str(pid).encode())
            os._exit(0)
        os.waitpid(parent, 0)
        channel.send(os.read(receiver, 64))
        for descriptor in (receiver, sender, *descriptors):
            os.close(descriptor)


def _work(channel: socket.socket, request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    code = 1
    try:
        channel.close()
        os.setsid()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        while os.getppid() != request["parent"]:
            time.sleep(0.001)
        sys.modules["batchscape.tracking.worker"].main(request["text"])
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
