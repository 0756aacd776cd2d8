"""A process that talks to Weights & Biases, as who started it sees it: watched, and ended in time.

W&B may take long, or for ever. What bounds it follows `WANDB_INIT_TIMEOUT`, which W&B knows too,
up to 600 s. This module does not import wandb.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from batchscape.record.folder import SweepFolder

__all__ = [
    "REPORT",
    "WORKSPACE",
    "Event",
    "Order",
    "Worker",
    "kill_tree",
    "patience_s",
    "silence_s",
]

REPORT = "report"
WORKSPACE = "workspace"
"""What events call what there is beside the runs; the others name a run."""

_PATIENCE_S = 20.0
_MOST_PATIENCE_S = 600.0
_STARTUP_S = 60.0
"""At least, until W&B is online, and where it is not: only a busy machine is waited for there."""
_LOOK_S = 0.1


@dataclass(frozen=True)
class Order:
    """What a worker has to do."""

    sweep_dir: str
    mode: str
    """`online`, `offline`, or `auto`: online with an API key, else offline."""
    live: bool = False
    """Whether to follow runs while they run, until the end is asked for; else all are looked at
    once."""
    waits: bool = False
    """Whether it waits for another process that mirrors the same sweep."""
    at_once: int = 1
    """Runs that have ended are mirrored so many at a time."""
    beside: Sequence[str] = ()
    """What of the sweep itself is sent too: `REPORT`, `WORKSPACE`."""
    project: str | None = None
    """Where runs go that W&B has not seen yet; by default as their own settings say."""
    entity: str | None = None
    tags: list[str] | None = None


@dataclass(frozen=True)
class Event:
    """What a worker says."""

    kind: Literal["online", "begin", "done", "damaged", "refused", "failed", "end"]
    """`damaged`: that run cannot be sent; `refused`: nothing can be
    mirrored in this mode; `failed`: W&B did. The last three are the last event of a worker."""
    run: str | None = None
    reason: str | None = None


class Worker:
    """A worker, started at low priority; `close` it.

    Parameters
    ----------
    order : Order

    Raises
    ------
    OSError
        If it cannot be started.
    """

    def __init__(self, order: Order) -> None:
        folder = SweepFolder(Path(order.sweep_dir)).wandb
        folder.mkdir(parents=True, exist_ok=True)
        # Not a pipe, which is full once nobody has read it for long.
        self._said = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (as long as the worker)
        self._read = 0
        # -P: a module in the current folder must not stand in for one that wandb imports.
        command = [sys.executable, "-P", "-m", "batchscape.tracking.worker"]
        self.log = folder / "mirror.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(order))],
                stdin=subprocess.PIPE,
                bufsize=0,  # a closed pipe is met where it is written to, and nowhere else
                stdout=self._said,
                stderr=log,
                env=_environment(folder, order.mode),
                start_new_session=True,  # Ctrl-C is for its parent
            )
        # From here, before it has imported anything: a hook in the child is unsafe with threads.
        with suppress(psutil.Error):
            psutil.Process(self._process.pid).nice(19)
        self.problem: str | None = None
        """What was missed last, and why."""
        self.has_finished = False
        """Whether it did all that it could in its mode."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, however that came."""
        return self._process.poll() is not None

    def ask_for_the_end(self) -> None:
        """Let it mirror what is left, and end."""
        if self._process.stdin is not None:
            with suppress(OSError):
                # A byte, because a forked relative may hold the pipe open.
                self._process.stdin.write(b"\n")

    def events(self, online_s: float, whole_s: float = math.inf) -> Iterator[Event]:
        """Yield what it says until it has ended; it is killed where that takes too long.

        Parameters
        ----------
        online_s : float
            Longest time between two events once it is online, in seconds.
        whole_s : float
            Longest time for all, in seconds.
        """
        began = heard = time.monotonic()
        bound_s = max(silence_s(), _STARTUP_S)
        while True:
            has_ended = self.has_ended  # asked first: then all that it said can be read
            for event in self._news():
                heard = time.monotonic()
                if event.kind == "online":
                    bound_s = online_s
                self.problem = event.reason or self.problem
                self.has_finished = event.kind == "end"
                yield event
            now = time.monotonic()
            if has_ended:
                if not self.has_finished and self.problem is None:
                    self.problem = f"it ended with exit code {self._process.returncode}"
                return
            if now - began >= whole_s:
                self.problem = f"it did not end within {whole_s:g} s"
            elif now - heard >= bound_s:
                self.problem = f"it did not answer for {bound_s:g} s"
            else:
                time.sleep(_LOOK_S)
                continue
            self._kill()
            return

    def close(self) -> None:
        """End it, and the helper of W&B, whatever they do."""
        self._kill()
        self._said.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _kill(self) -> None:
        if not self.has_ended:
            kill_tree(self.pid)
            self._process.wait()

    def _news(self) -> Iterator[Event]:
        content = os.pread(self._said.fileno(), 1 << 20, self._read)
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError, TypeError):  # whatever a library prints
                yield Event(**json.loads(line))


def kill_tree(pid: int) -> None:
    """Kill the descendants of a process of ours (W&B runs its own helper), and then itself."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def patience_s() -> float:
    """Return the time that W&B itself has to open a run, and to show its end, in seconds."""
    try:
        given = float(os.environ.get("WANDB_INIT_TIMEOUT", _PATIENCE_S))
    except ValueError:
        return _PATIENCE_S
    return min(given, _MOST_PATIENCE_S) if given > 0 else _PATIENCE_S


def silence_s() -> float:
    """Return after how long without a word a worker that is online is ended, in seconds."""
    return 10.0 + 6.0 * patience_s()


def _environment(folder: Path, mode: str) -> dict[str, str]:
    """Environment of a worker: the user's, quiet, and leaving nothing outside the sweep."""
    environment = {
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_DATA_DIR": str(folder / "cache"),
        **os.environ,
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    environment.pop("WANDB_SERVICE", None)  # would tie it to a W&B process of the launcher
    if mode != "auto":
        environment.pop("WANDB_MODE", None)
    return environment
