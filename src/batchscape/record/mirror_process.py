"""The process that mirrors run folders to W&B: `python -m batchscape.record.mirror_process`.

It looks at the run folders every few seconds until its standard input ends or carries a byte,
mirrors what is left, and ends. One process mirrors a sweep at a time; a second one waits.

W&B may fail, refuse or hang whenever it is called. This process then replaces itself by one that
writes offline: a fresh start is the only state of the W&B library that is known to work, and a
hanging call cannot be ended otherwise. Where W&B fails offline too, the process ends with code 1.
All waits are in `record.mirror_bounds`; what one run's own files make impossible leaves the other
runs alone.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal, NoReturn

import psutil
import wandb

from batchscape.config import WandbTracker
from batchscape.credentials import redact
from batchscape.errors import RecordError
from batchscape.outgoing import visible
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.mirror_bounds import OFFLINE_S, closing_s, opening_s, patience_s
from batchscape.record.mirror_state import (
    GIVING_UP,
    MIRRORED_STATUSES,
    MirrorState,
    progress_sign,
)
from batchscape.record.status import RunStatus, Status
from batchscape.record.wandb_run import WandbRun

__all__ = ["Mirror", "end_helpers", "knows_a_key", "main", "only_one"]

_POLL_S = 2.0
_FAILED = 1
"""Exit code where W&B fails offline as well."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Mirror a sweep; see `record.mirror.start` for what starts it.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the command line by default.

    Returns
    -------
    int
        Exit code.
    """
    parser = argparse.ArgumentParser(description="Mirror the runs of a sweep to W&B.")
    parser.add_argument("sweep_dir", type=Path)
    parser.add_argument("tracker", help="settings of the tracker, as JSON")
    parser.add_argument("--live", action="store_true", help="follow runs while they run")
    parser.add_argument("--offline-because", help="write offline, and why")
    given = parser.parse_args(arguments)
    tracker = WandbTracker(**json.loads(given.tracker))
    launcher = _Launcher(given.live)
    with only_one(given.sweep_dir, wait=True):
        mode, problem = _mode(tracker, given.offline_because)
        mirror = Mirror(given.sweep_dir, tracker, mode=mode, problem=problem, live=given.live)
        while not launcher.is_done:
            mirror.look()
            launcher.wait(_POLL_S)
        mirror.look()
        mirror.leave()
    return 0


class Mirror:
    """All runs of one sweep, and the ones that are open in W&B.

    Parameters
    ----------
    sweep_dir : Path
    tracker : WandbTracker
    mode : str
        `online` or `offline`.
    problem : str or None
        Why it is offline although it was meant to be online.
    live : bool
        Whether to follow runs that run.
    """

    def __init__(
        self,
        sweep_dir: Path,
        tracker: WandbTracker,
        *,
        mode: Literal["online", "offline"],
        problem: str | None,
        live: bool,
    ) -> None:
        self._sweep = SweepFolder(sweep_dir)
        self._tracker = tracker
        self._mode = mode
        self._problem = problem
        self._live = live
        self._open: dict[Path, WandbRun] = {}
        self._settled: dict[Path, int] = {}

    def look(self) -> None:
        """Mirror what is new in every run folder."""
        for folder in self._sweep.run_folders():
            try:
                written = folder.status.stat().st_mtime_ns
            except FileNotFoundError:
                continue
            # Most runs of a long sweep are over: their files are read once.
            if self._settled.get(folder.path) == written:
                continue
            try:
                settled = self._visit(folder)
            except RecordError as error:
                _log(str(error))
                settled = True
            if settled:
                self._settled[folder.path] = written
            with suppress(OSError):
                os.utime(progress_sign(self._sweep.path))

    def leave(self) -> None:
        """End the segments of runs that are still marked as running: nobody is left to end them."""
        for path, run in self._open.items():
            with self._bounded(closing_s(), f"the rows of {path.name}"):
                try:
                    run.leave()
                except RecordError as error:
                    _log(str(error))

    def _visit(self, folder: RunFolder) -> bool:
        """Mirror what is new in one run folder; return whether that is all until it changes."""
        status = RunStatus.read(folder.status)
        run = self._open.get(folder.path)
        if status.status is Status.RUNNING and self._live:
            run = run or self._start(folder, status)
            if run is not None:
                self._open[folder.path] = run
                with self._bounded(closing_s(), f"the rows of {folder.path.name}"):
                    run.follow()
            return run is None
        if status.status in MIRRORED_STATUSES:
            state = MirrorState.read(folder)
            if run is None and (state is None or not state.covers(status)):
                run = self._start(folder, status)
            if run is not None:
                self._open.pop(folder.path, None)
                with self._bounded(closing_s(), f"the end of {folder.path.name}"):
                    try:
                        is_there = run.close(status)
                    except RecordError:
                        run.drop()
                        raise
                if not is_there:
                    # It was refused for good; the next run would cost the same wait.
                    self._give_up(f"it does not show the end of {folder.path.name}")
        return True

    def _start(self, folder: RunFolder, status: RunStatus) -> WandbRun | None:
        """Open a run in W&B; None if it cannot be gone on with in this mode."""
        mode, problem = self._mode, self._problem
        state = MirrorState.read(folder)
        if state is not None and state.mode == "online" and not state.closed and mode == "offline":
            # Only the server knows which rows of the segment that was cut short have reached it.
            _log(f"{folder.path.name} was cut short online: W&B must be reachable to go on")
            return None
        with self._bounded(opening_s(), f"the start of {folder.path.name}"):
            return WandbRun(
                folder,
                self._sweep.path,
                self._tracker,
                mode=mode,
                status=status,
                problem=problem,
                patience_s=patience_s(),
            )

    @contextmanager
    def _bounded(self, deadline_s: float, what: str) -> Iterator[None]:
        """Give up if what W&B does inside fails, or takes longer than a deadline."""
        if self._mode == "offline":
            deadline_s = max(deadline_s, OFFLINE_S)
        silence = f"it did not take {what} within {deadline_s:g} s"
        timer = threading.Timer(deadline_s, self._give_up, [silence])
        timer.daemon = True
        timer.start()
        try:
            yield
        except RecordError:
            raise  # of this run's files
        except Exception as error:  # noqa: BLE001  (W&B raises errors of many families)
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            self._give_up(f"it failed on {what} ({said})")
        finally:
            timer.cancel()

    def _give_up(self, why: str) -> NoReturn:
        """Go on offline, in a process that is new to W&B; end where this one is offline already."""
        reason = redact(f"W&B cannot be written to: {why}")
        end_helpers()
        _log(f"{GIVING_UP}{reason}")
        if self._mode == "offline":
            os._exit(_FAILED)
        command = [sys.executable, "-P", "-m", "batchscape.record.mirror_process"]
        command += [str(self._sweep.path), json.dumps(asdict(self._tracker))]
        command += ["--offline-because", reason, *(["--live"] if self._live else [])]
        # W&B notes its helper, which is dead now, in the environment.
        environment = {name: v for name, v in os.environ.items() if name != "WANDB_SERVICE"}
        os.execve(sys.executable, command, environment)  # noqa: S606  (no shell is wanted)


class _Launcher:
    """The process that started this one, at the other end of standard input."""

    def __init__(self, live: bool) -> None:
        self._parent = os.getppid()
        self.is_done = not live

    def wait(self, timeout_s: float) -> None:
        """Wait until the launcher is done or gone, at most for a while."""
        readable, _, _ = select.select([sys.stdin], [], [], timeout_s)
        # A forked relative may hold the pipe open after the launcher has died.
        self.is_done = bool(readable) or os.getppid() != self._parent


def _log(message: str) -> None:
    with suppress(OSError):  # of a full disk
        print(redact(visible(message)), file=sys.stderr, flush=True)  # noqa: T201  (goes to mirror.log)


def end_helpers() -> None:
    """Kill what W&B has started beside this process."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()


def knows_a_key() -> bool:
    """Whether W&B finds an API key: in the environment, in netrc, or in its settings."""
    try:
        return bool(wandb.login(verify=False))  # asks nobody
    except wandb.Error:
        return False


@contextmanager
def only_one(sweep_dir: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of what mirrors a sweep; it goes with the process, however that ends.

    Parameters
    ----------
    sweep_dir : Path
        Folder of the sweep.
    wait : bool
        Whether to wait for a process that holds it.

    Yields
    ------
    bool
        Whether the lock is held: not where another process has it and is not waited for.
    """
    with progress_sign(sweep_dir).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _mode(
    tracker: WandbTracker, offline_because: str | None
) -> tuple[Literal["online", "offline"], str | None]:
    """Decide between online and offline, without the network."""
    if tracker.mode == "offline" or offline_because is not None:
        return "offline", offline_because
    if knows_a_key():
        return "online", None
    no_key = "no API key is known; `wandb login` or WANDB_API_KEY gives one"
    return "offline", no_key if tracker.mode == "online" else None


if __name__ == "__main__":
    sys.exit(main())
