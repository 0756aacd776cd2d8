"""Processes that talk to W&B for tests, forked from one that has imported its library once.

A process imports it for two seconds; tests start one for each mirror or sync. What it does after
its imports is the product's. Those that another process starts, as `batchscape sync` does, are
started as ever.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import warm_interpreter
from warm_interpreter import ForkedInterpreter, WarmInterpreter

WORKER = "batchscape.tracking.worker"


class ForkedWorker(ForkedInterpreter):
    """What a mirror asks of the `Popen` of its process."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        super().__init__(pid)
        self.stdin = stdin


class WarmWorkers(WarmInterpreter):
    """The process from which they are forked."""

    def __init__(self) -> None:
        super().__init__(__name__)

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
        reading, writing = os.pipe()
        try:
            worker = self.call(
                f"{__name__}:be_worker",
                command[-1:],
                output=stdout,
                errors=stderr,
                reads=reading,
                environment=env,
                folder=Path.cwd(),
            )
        finally:
            os.close(reading)
        return ForkedWorker(worker.pid, os.fdopen(writing, "wb", buffering=0))


def be_worker(arguments: list[str]) -> None:
    """Do what the module does as a program."""
    importlib.import_module(WORKER).main(arguments[0])


def main() -> None:
    """Be the process from which they are forked."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warm_interpreter.main([WORKER])
