"""The mirror of a launch, and the process that talks to Weights & Biases as its caller sees it.

It works beside runs only where that costs them nothing, else after them. W&B may take long, or for
ever: a process that says nothing for long is ended. This module does not import wandb.
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
from batchscape.tracking.state import standing_of, sync_command

_SILENCE_S = 60.0
"""For a busy machine, beside what W&B takes."""
_LOOK_S = 0.1


def patience_s() -> float:
    """Return the time that W&B has to open a run, and to show its end, in seconds."""
    return min(float(os.environ.get("WANDB_INIT_TIMEOUT") or 20), 600.0)


def may_mirror_live(specs: Sequence[RunSpec], cpu_cores: int) -> bool:
    """Return whether the mirror can work beside timed runs without taking anything from them."""
    if not specs or any(spec.device_type != "cuda" for spec in specs):
        return False
    ranks = max(spec.geometry.data_parallel_size for spec in specs)
    return cpu_cores > 2 * ranks * specs[0].config.launcher.concurrent_runs + 2


@dataclass(frozen=True)
class MirrorRequest:
    """What the process of a mirror has to do."""

    sweep_dir: str
    mode: str
    """`online`, `offline`, or `auto`: online with an API key, else offline."""
    work: Literal["live", "rest", "sync"]
    """Follow runs until the end is asked for; send what has ended; the same at a command, unless
    another process is at it."""
    beside: Sequence[str] = ()
    """What of the sweep itself is sent too: `report`, `workspace`."""
    project: str | None = None
    """Where runs go that W&B has not seen yet; by default as their own settings say."""
    entity: str | None = None
    tags: list[str] | None = None


@dataclass(frozen=True)
class Event:
    """What the process says."""

    kind: Literal["rows", "done", "failed", "refused", "end"]
    """`rows`: W&B takes the rows of a long run. The last two are its last: nothing can be mirrored
    in this mode; all was looked at."""
    run: str | None = None
    """A run, or `report`, or `workspace`; None: all of them."""
    reason: str | None = None


class Worker:
    """A process at work, at low priority; `close` it.

    Raises
    ------
    OSError
        If it cannot be started.
    """

    def __init__(self, request: MirrorRequest) -> None:
        folder = SweepFolder(Path(request.sweep_dir)).wandb
        folder.mkdir(parents=True, exist_ok=True)
        # Not a pipe, which is full once nobody has read it for long.
        self._events = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (as long as the worker)
        self._read = 0
        # -P: a module in the current folder must not stand in for one that wandb imports.
        command = [sys.executable, "-P", "-m", "batchscape.tracking.worker"]
        self.log = folder / "mirror.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(request))],
                stdin=subprocess.PIPE,
                bufsize=0,  # a closed pipe is met where it is written to, and nowhere else
                stdout=self._events,
                stderr=log,
                env=_environment(folder, request.mode),
                start_new_session=True,  # Ctrl-C is for its parent
            )
        # From here, before it has imported anything: a hook in the child is unsafe with threads.
        with suppress(psutil.Error):
            psutil.Process(self._process.pid).nice(19)
        self.problem: str | None = None
        """What was missed last, and why."""
        self.has_finished = False
        """Whether it looked at all there is."""

    def ask_for_the_end(self) -> None:
        """Let it mirror what is left, and end."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(b"\n")

    def events(self, silence_s: float) -> Iterator[Event]:
        """Yield what it says until it has ended; it is killed where it is silent for too long.

        Parameters
        ----------
        silence_s : float
            Longest time between two events, in seconds.
        """
        heard = time.monotonic()
        while not self.has_finished:
            has_ended = self._process.poll() is not None  # first: then all that it said is there
            for event in self._news():
                heard = time.monotonic()
                self.problem = event.reason or self.problem
                self.has_finished = event.kind == "end"
                yield event
            if has_ended:
                if not self.has_finished and self.problem is None:
                    self.problem = f"it ended with exit code {self._process.returncode}"
                return
            if time.monotonic() - heard >= silence_s:
                self.problem = f"it did not answer for {silence_s:g} s"
                return
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """End it, and the helper of W&B, whatever they do."""
        if self._process.poll() is None:
            kill_tree(self._process.pid)
            self._process.wait()
        self._events.close()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _news(self) -> Iterator[Event]:
        content = os.pread(self._events.fileno(), 1 << 20, self._read)
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError, TypeError):  # whatever a library prints
                yield Event(**json.loads(line))


class Mirror:
    """The mirror of one launch; nothing at all without a tracker.

    What goes wrong here is told, and stops no training. Nobody waits for it before `finish`.

    Parameters
    ----------
    tracker : WandbTracker or NoTracker
    sweep : SweepFolder
    live : bool
        Whether to mirror from now on, else only in `finish`.
    """

    def __init__(self, tracker: Tracker, sweep: SweepFolder, *, live: bool) -> None:
        self._tracker = tracker if isinstance(tracker, WandbTracker) else None
        self._sweep_dir = sweep.path.resolve()
        self._problems: list[str] = []
        self._live = self._start("live") if live else None

    def finish(self, *, interrupted: bool) -> str | None:
        """Mirror what is left, unless the user waits for the end.

        Returns
        -------
        str or None
            What was not mirrored, and how to get it later; None where all was.
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
                # One that failed on the way is gone on with by another.
                if self._live is None or standing_of(self._sweep_dir).lacking:
                    self._drain(self._start("rest"))
        except KeyboardInterrupt:
            self._problems.append("the wait for it was interrupted")
        except Exception as error:  # noqa: BLE001  (what goes wrong here must fail no sweep)
            self._problems.append(f"{type(error).__name__}: {error}")
        why = "; ".join(dict.fromkeys(self._problems))
        try:
            note = standing_of(self._sweep_dir).missing(why)
        except OSError as error:
            command = sync_command(self._sweep_dir)
            note = f"What Weights & Biases lacks is not known: {error}. `{command}` sends it."
        return None if note is None else redact(note)

    def standing(self) -> str | None:
        """Say where W&B has the runs of the sweep; None where it has none, or none can be read."""
        if self._tracker is not None:
            with suppress(OSError):  # `finish` has told it
                return str(standing_of(self._sweep_dir)) or None
        return None

    def _start(self, work: Literal["live", "rest"]) -> Worker | None:
        if self._tracker is None:
            return None
        chosen = (), self._tracker.project, self._tracker.entity, self._tracker.tags
        try:
            return Worker(MirrorRequest(str(self._sweep_dir), self._tracker.mode, work, *chosen))
        except OSError as error:
            self._problems.append(f"its mirror cannot start ({error})")
        return None

    def _drain(self, worker: Worker | None) -> None:
        """Let a process mirror what is left; note what kept it from that."""
        if worker is None:
            return
        try:
            worker.ask_for_the_end()
            for _ in worker.events(_SILENCE_S + 3 * patience_s()):
                pass
        finally:
            worker.close()
        if worker.problem is not None:
            self._problems.append(worker.problem)


def kill_tree(pid: int) -> None:
    """Kill the descendants of a process of ours (W&B runs its own helper), and then itself."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def _environment(folder: Path, mode: str) -> dict[str, str]:
    """Environment of the process: the user's, quiet, and leaving nothing outside the sweep."""
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
