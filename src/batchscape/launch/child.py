"""The life of one rank's process, around the worker that it calls.

A rank belongs to the process group of its run, reads nothing, prints into the run's log, and does
not outlive the process that started it. Both ways of starting end in `live`: `launch.forkserver`
forks a process for it, and this module's `main` is the first function of a spawned one.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from batchscape.outgoing import redact
from batchscape.record.files import end_of
from batchscape.record.heartbeat import beats_path, share, stacks_path

WORKER = "batchscape.train.worker:main"
"""Entry point of a rank: `module:function`, which takes run folder and rank and returns a code."""

COMMAND_WORKER = "batchscape.programs.worker:main"
"""The same for `engine=command`, where one process watches all that the program starts."""

WORKER_ENVIRONMENT = {
    # One thread a rank, decided before any library counts the cores. Waiting threads must sleep:
    # spinning ones take the core from the next rank.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    # Let torch count devices through NVML: asking the driver would make forking impossible.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment of every process that trains, set before its first import."""

_LOG_TAIL_BYTES = 4096

_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from batchscape.launch.{module} import main; main(sys.argv[1], sys.argv[2])"
)
# A fresh interpreter imports from where the launcher does, installed or not.


@dataclass(frozen=True)
class Start:
    """Arguments of the processes of one run."""

    run_id: str
    """Name of the run in messages; a prediction has one, too."""
    run_dir: str
    """Folder of the run."""
    log: str
    """File that the ranks append to."""
    ranks: int
    """Number of ranks that are started here."""
    entry: str
    """Entry point of each rank, see `WORKER`."""
    environment: dict[str, str]
    """Added to the environment of the ranks."""
    heartbeat_prefix: str = ""
    """Prefix of the paths of the ranks' files for heartbeats and stacks, see `record.heartbeat`.
    Empty: nobody watches, and stacks go to the log."""
    first_rank: int = 0
    """Number of the first rank; the others follow."""

    @property
    def rank_numbers(self) -> range:
        """Numbers of the ranks that are started here."""
        return range(self.first_rank, self.first_rank + self.ranks)


def resolve(entry: str) -> Callable[[str, int], int]:
    """Import the function that `module:function` names."""
    module, _, function = entry.partition(":")
    worker: Callable[[str, int], int] = getattr(importlib.import_module(module), function)
    return worker


def live(start: Start, rank: int) -> NoReturn:
    """Be a rank: redirect, call the entry point, leave with its code."""
    code = 1
    try:
        _redirect(start.log)
        _share_heartbeat(start.heartbeat_prefix, rank)
        os.environ.update(start.environment)
        sys.argv = [f"batchscape rank {rank} of {start.run_id}"]
        try:
            code = resolve(start.entry)(start.run_dir, rank)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:  # noqa: BLE001  (nothing may pass: the stack below is the server's)
            sys.stderr.write(redact(traceback.format_exc()))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        # No teardown of the interpreter: native threads of a process group may never join.
        os._exit(code)


def main(start_text: str, rank: str) -> NoReturn:
    """Be a spawned rank. Standard input is a pipe whose other end only the launcher holds."""
    life_line = os.dup(0)

    def die_with_launcher() -> None:
        os.read(life_line, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=die_with_launcher, daemon=True).start()
    live(Start(**json.loads(start_text)), int(rank))


def last_line(log: Path, offset: int = 0) -> str | None:
    """Return the last line that ranks have printed into a log, behind an offset; None without."""
    text = end_of(log, _LOG_TAIL_BYTES, offset).decode(errors="replace")
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), None)


def _redirect(log: str) -> None:
    source = os.open(os.devnull, os.O_RDONLY)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(source, 0)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(source)
    os.close(sink)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A line is one write, so that the lines of ranks do not mix.
            stream.reconfigure(
                encoding="utf-8",
                errors="backslashreplace",
                line_buffering=True,
                write_through=False,
            )
    faulthandler.enable()


def _share_heartbeat(prefix: str, rank: int) -> None:
    """Share the heartbeat, and dump all stacks on SIGUSR1, wherever the rank is stuck."""
    stacks_descriptor = 2
    with suppress(OSError):
        if prefix:
            share(beats_path(prefix, rank))
            # A file for each rank: stacks that ranks write into one file at the same time mix.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            stacks_descriptor = os.open(stacks_path(prefix, rank), flags, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks_descriptor, all_threads=True)


def start_interpreter(
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
            _BOOT.format(module=module),
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
