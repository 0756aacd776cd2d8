"""Uploads runs of a sweep in a process of its own, which may fail or hang, and goes on after it."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from batchscape.config import WandbTracker
from batchscape.errors import LaunchError
from batchscape.record.mirror import kill_tree, mirror_log, wandb_environment

__all__ = ["Outcome", "upload"]

_PROCESS = "batchscape.record.sync_process"


@dataclass(frozen=True)
class Outcome:
    """What the upload of one run came to, or that it begins."""

    run: str
    is_done: bool = False
    """Whether W&B has all of the run."""
    problem: str | None = None
    """Why it has not; None also where the upload begins."""


def upload(
    sweep_dir: Path,
    runs: Sequence[str],
    *,
    project: str | None,
    entity: str | None,
    timeout_s: float,
) -> Iterator[Outcome]:
    """Upload runs one after the other; one that fails leaves the others alone.

    Parameters
    ----------
    sweep_dir : Path
        Folder of the sweep.
    runs : sequence of str
        Names of run folders.
    project, entity : str or None
        Where runs that W&B has not seen yet go; None: as their own settings say.
    timeout_s : float
        Longest time that one run may take, in seconds.

    Yields
    ------
    Outcome
        One when a run begins, one when it ends.

    Raises
    ------
    LaunchError
        If nothing can be uploaded: no key, no network, or another process is at it.
    """
    destination = json.dumps({"project": project, "entity": entity})
    left = list(runs)
    while left:
        current: str | None = None
        problem = f"no end after {timeout_s:g} s"
        with _Process(sweep_dir, destination, left) as process:
            for message in process.messages(timeout_s):
                if message["event"] in {"refused", "busy"}:
                    raise LaunchError(message["reason"])
                current = message["run"]
                yield _outcome(message)
                if message["event"] != "start":
                    left.remove(message["run"])
                    current = None
            if process.has_ended:
                problem = f"the upload ended with exit code {process.exit_code}"
        if current is not None:
            left.remove(current)
            yield Outcome(current, problem=f"{problem}; details: {mirror_log(sweep_dir)}")
        elif left and not process.has_told:
            msg = f"Weights & Biases: {problem}; details: {mirror_log(sweep_dir)}"
            raise LaunchError(msg)


def _outcome(message: dict[str, str]) -> Outcome:
    return Outcome(message["run"], message["event"] == "done", message.get("reason"))


class _Process:
    """One start of the uploading process; killed, with W&B's helper, when it is left."""

    def __init__(self, sweep_dir: Path, destination: str, runs: Sequence[str]) -> None:
        log_path = mirror_log(sweep_dir)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # -P: a module in the current folder must not stand in for one that wandb imports.
        command = [sys.executable, "-P", "-m", _PROCESS, str(sweep_dir), destination, *runs]
        tracker = WandbTracker(name="wandb", mode="online")
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=wandb_environment(sweep_dir, tracker),
                start_new_session=True,  # Ctrl-C is for the parent, which then kills it
            )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        # A daemon: W&B's helper may hold the pipe open after the process has ended.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.has_told = False
        self.has_ended = False

    @property
    def exit_code(self) -> int:
        """Exit code, once it has ended."""
        return self._process.wait()

    def messages(self, timeout_s: float) -> Iterator[dict[str, str]]:
        """Yield what it tells, until it ends or is silent for too long."""
        deadline = time.monotonic() + timeout_s
        while not self.has_ended and time.monotonic() < deadline:
            # Asked first: what it told before its end is then in the queue, or soon will be.
            self.has_ended = self._process.poll() is not None
            try:
                line = self._lines.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            self.has_ended = False
            if line is None:
                self.has_ended = True
                return
            deadline = time.monotonic() + timeout_s
            with suppress(ValueError):  # whatever a library prints
                message = json.loads(line)
                if isinstance(message, dict) and "event" in message:
                    self.has_told = True
                    yield message

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.has_ended:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        if self._process.poll() is None:
            kill_tree(self._process.pid)
            self._process.wait()
        self._reader.join(_GRACE_S)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()


_POLL_S = 0.5
_GRACE_S = 5.0
"""How long a process whose output has ended may take to end itself."""
