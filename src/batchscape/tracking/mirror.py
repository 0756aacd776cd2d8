"""The mirror of a launch, and the caller's side of the process that talks to Weights & Biases.

The process works beside runs only where that costs them nothing, else after them. W&B may hang: a
process that is silent for too long is ended. This module does not import wandb.
"""

from __future__ import annotations

import json
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

from batchscape.config import Tracker, WandbTracker
from batchscape.outgoing import redact
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.tracking.state import sync_command, uploads_of

_SILENCE_S = 60.0
"""How long the process may be silent on a busy machine, in addition to the patience with W&B."""
_POLL_S = 0.1


def patience_s() -> float:
    """Return the time that W&B has to open a run, and to show its end, in seconds."""
    return min(float(os.environ.get("WANDB_INIT_TIMEOUT") or 20), 600.0)


def may_mirror_live(specs: Sequence[RunSpec], cpu_cores: int) -> bool:
    """Return whether the mirror can work beside timed runs without disturbing them."""
    if not specs or any(spec.device_type != "cuda" for spec in specs):
        return False
    ranks = max(spec.geometry.data_parallel_size for spec in specs)
    return cpu_cores > 2 * ranks * specs[0].config.launcher.concurrent_runs + 2


@dataclass(frozen=True)
class MirrorRequest:
    """Request to the process of a mirror."""

    sweep_dir: str
    mode: str
    """`online`, `offline`, or `auto`: online with an API key, else offline."""
    work: Literal["live", "rest", "sync"]
    """`live` follows runs until its end is requested; `rest` sends the runs that have ended; `sync`
    does the same at a command, unless another process mirrors the sweep."""
    sweep_parts: Sequence[str] = ()
    """Parts of the sweep itself to send: `report`, `workspace`."""
    project: str | None = None
    """Project of runs that are new to W&B; by default that of their own settings."""
    entity: str | None = None
    tags: list[str] | None = None


@dataclass(frozen=True)
class Event:
    """Message of the process."""

    kind: Literal["rows", "done", "failed", "refused", "end"]
    """`rows`: W&B takes the rows of a long run. `refused` and `end` are the last: nothing can be
    mirrored in this mode; all runs were read."""
    run: str | None = None
    """A run, or `report`, or `workspace`; None: the whole sweep."""
    reason: str | None = None


class Worker:
    """The process of a mirror, at low priority; the caller closes it.

    Raises
    ------
    OSError
        If it cannot be started.
    """

    def __init__(self, request: MirrorRequest) -> None:
        folder = SweepFolder(Path(request.sweep_dir)).wandb
        folder.mkdir(parents=True, exist_ok=True)
        # A file, as a pipe that nobody reads would fill up.
        self._events = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (as long as the worker)
        self._offset = 0
        # -P: a module in the current folder must not replace one that wandb imports.
        command = [sys.executable, "-P", "-m", "batchscape.tracking.worker"]
        self.log = folder / "mirror.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(request))],
                stdin=subprocess.PIPE,
                bufsize=0,  # only a write can meet a closed pipe
                stdout=self._events,
                stderr=log,
                env=_environment(folder, request.mode),
                start_new_session=True,  # Ctrl-C is for its parent
            )
        # Set by the parent: a hook in the child is unsafe with threads.
        with suppress(psutil.Error):
            psutil.Process(self._process.pid).nice(19)
        self.problem: str | None = None
        """Last failure, with its reason."""
        self.has_finished = False
        """Whether it has read all runs."""

    def request_end(self) -> None:
        """Let it mirror the remaining rows, and end."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(b"\n")

    def events(self, silence_s: float) -> Iterator[Event]:
        """Yield its messages until it has ended, or is silent for too long.

        Parameters
        ----------
        silence_s : float
            Longest time between two events, in seconds.
        """
        last_at = time.monotonic()
        while not self.has_finished:
            # Asked before the messages are read: after its end there are no more.
            has_ended = self._process.poll() is not None
            for event in self._new_events():
                last_at = time.monotonic()
                self.problem = event.reason or self.problem
                self.has_finished = event.kind == "end"
                yield event
            if has_ended:
                if not self.has_finished and self.problem is None:
                    self.problem = f"it ended with exit code {self._process.returncode}"
                return
            if time.monotonic() - last_at >= silence_s:
                self.problem = f"it did not answer for {silence_s:g} s"
                return
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Kill the process and the helper of W&B."""
        if self._process.poll() is None:
            kill_tree(self._process.pid)
            self._process.wait()
        self._events.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _new_events(self) -> Iterator[Event]:
        content = os.pread(self._events.fileno(), 1 << 20, self._offset)
        lines = content[: content.rfind(b"\n") + 1]
        self._offset += len(lines)
        for line in lines.splitlines():
            with suppress(ValueError, TypeError):  # a library may print other lines
                yield Event(**json.loads(line))


class Mirror:
    """The mirror of one launch; without a tracker it does nothing.

    A failure here is reported, and stops no training. Only `finish` waits.

    Parameters
    ----------
    tracker : WandbTracker or NoTracker
    sweep : SweepFolder
    live : bool
        Whether to mirror during the launch, else only in `finish`.
    """

    def __init__(self, tracker: Tracker, sweep: SweepFolder, *, live: bool) -> None:
        self._tracker = tracker if isinstance(tracker, WandbTracker) else None
        self._sweep_dir = sweep.path.resolve()
        self._problems: list[str] = []
        self._live = self._start("live") if live else None

    def finish(self, *, interrupted: bool) -> str | None:
        """Mirror the remaining rows, unless the user has interrupted the sweep.

        Returns
        -------
        str or None
            Which runs were not mirrored, and how to send them; None where all were.
        """
        if self._tracker is None:
            return None
        try:
            if interrupted:
                self._problems.append("the sweep was interrupted")
                if self._live is not None:
                    self._live.close()
            else:
                self._drain(self._live)
                # A second process continues where the live one has failed.
                if self._live is None or uploads_of(self._sweep_dir).missing_runs:
                    self._drain(self._start("rest"))
        except KeyboardInterrupt:
            self._problems.append("the wait for it was interrupted")
        except Exception as error:  # noqa: BLE001  (no error here may fail a sweep)
            self._problems.append(f"{type(error).__name__}: {error}")
        reasons = "; ".join(dict.fromkeys(self._problems))
        try:
            note = uploads_of(self._sweep_dir).missing_runs_note(reasons)
        except OSError as error:
            command = sync_command(self._sweep_dir)
            note = f"What Weights & Biases lacks is not known: {error}. `{command}` sends it."
        return None if note is None else redact(note)

    def summary(self) -> str | None:
        """Say in which project W&B has the runs of the sweep; None where it has none."""
        if self._tracker is not None:
            with suppress(OSError):  # `finish` has reported it
                return str(uploads_of(self._sweep_dir)) or None
        return None

    def _start(self, work: Literal["live", "rest"]) -> Worker | None:
        if self._tracker is None:
            return None
        fields = (), self._tracker.project, self._tracker.entity, self._tracker.tags
        try:
            return Worker(MirrorRequest(str(self._sweep_dir), self._tracker.mode, work, *fields))
        except OSError as error:
            self._problems.append(f"its mirror cannot start ({error})")
        return None

    def _drain(self, worker: Worker | None) -> None:
        """Let a process mirror the remaining rows; note its problem."""
        if worker is None:
            return
        try:
            worker.request_end()
            for _ in worker.events(_SILENCE_S + 3 * patience_s()):
                pass
        finally:
            worker.close()
        if worker.problem is not None:
            self._problems.append(worker.problem)


def kill_tree(pid: int) -> None:
    """Kill the descendants of a process (W&B starts a helper), then the process."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def _environment(folder: Path, mode: str) -> dict[str, str]:
    """Return the environment of the process: W&B is quiet and writes only into the sweep folder."""
    environment = {
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_DATA_DIR": str(folder / "cache"),
        **os.environ,
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    environment.pop("WANDB_SERVICE", None)  # it would use a W&B process of the launcher
    if mode != "auto":
        environment.pop("WANDB_MODE", None)
    return environment
