"""The process that talks to Weights & Biases: `python -m batchscape.tracking.worker ORDER`.

It mirrors run folders, several at a time where that is asked for, then the report of the sweep, and
says on its standard output where it is. W&B may fail, refuse or hang whenever it is called: who
started this process then starts another one, since a fresh start is the only state of the W&B
library that is known to work. What one run's own files or the server make impossible leaves the
others alone.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Literal

import wandb

from batchscape.config import WandbTracker
from batchscape.errors import RecordError
from batchscape.outgoing import redact, visible
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.locks import has_no_locks
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status
from batchscape.tracking.labels import label_of, sweep_id_of
from batchscape.tracking.report import send_report
from batchscape.tracking.run import WandbRun
from batchscape.tracking.state import MIRRORED_STATUSES, MirrorState, report_content
from batchscape.tracking.watch import (
    REPORT,
    WORKSPACE,
    Event,
    Order,
    kill_tree,
    patience_s,
)

__all__ = ["main"]

_POLL_S = 2.0
_TELLING = threading.Lock()
"""One line at a time."""
_NO_KEY = "no API key is known; `wandb login` or WANDB_API_KEY gives one"
_BUSY = "another process mirrors this sweep now: its own sweep, or another sync; wait for its end"


class _RefusedError(Exception):
    """Nothing can be mirrored in this way, and why."""


def main(text: str) -> None:
    """Mirror the runs of a sweep.

    Parameters
    ----------
    text : str
        An `Order`, as JSON.
    """
    order = Order(**json.loads(text))
    asked = threading.Event()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    with (SweepFolder(Path(order.sweep_dir)).wandb / "mirror.lock").open("w") as lock:
        try:
            _hold(lock, waits=order.waits)
            mirror = _Mirror(order, _mode(order))
            while True:
                is_last = asked.is_set() or not order.live
                mirror.look()
                mirror.look_beside()
                if is_last:
                    break
                asked.wait(_POLL_S)
            if mirror.has_failed:
                _tell(Event("end"))
                kill_tree(os.getpid())  # what is left of W&B could hang
            # Runs of another launcher that still run are left: its own mirror goes on with them.
            wandb.teardown(exit_code=1)
        except _RefusedError as error:
            _tell(Event("refused", reason=str(error)))
        except Exception as error:  # noqa: BLE001  (W&B raises errors of many families)
            _tell(Event("failed", reason=_said(error)))
            kill_tree(os.getpid())
        else:
            _tell(Event("end"))


class _Mirror:
    """All runs of one sweep, and the ones that are open in W&B."""

    def __init__(self, order: Order, mode: Literal["online", "offline"]) -> None:
        self._order = order
        self._sweep = SweepFolder(Path(order.sweep_dir))
        self._mode = mode
        self._open: dict[Path, WandbRun] = {}
        self._settled: dict[Path, int] = {}
        self._sweep_id = ""
        self.has_failed = False
        """Whether W&B has failed with a run."""

    def look(self) -> None:
        """Mirror what is new in every run folder."""
        if not self._sweep_id:
            state = MirrorState.read(self._sweep)
            noted = None if state is None else state.sweep_id
            self._sweep_id = noted or sweep_id_of(self._sweep.run_folders())
        folders = [folder for folder in self._sweep.run_folders() if folder.status.exists()]
        with ThreadPoolExecutor(self._order.at_once) as pool:
            for look in [pool.submit(self._look_at, folder) for folder in folders]:
                look.result()

    def look_beside(self) -> None:
        """Send what is asked for of the sweep itself, if W&B lacks it."""
        wanted, state = self._order.beside, MirrorState.read(self._sweep)
        if not wanted or not self._sweep_id:
            return  # or no run of it has begun
        if state is None:
            place = self._place()
            state = MirrorState(place.project, place.entity, sweep_id=self._sweep_id)
        if REPORT in wanted and report_content(self._sweep) not in {None, state.content}:
            _tell(Event("begin", REPORT))
            if not send_report(self._sweep, state, patience_s()):
                msg = "the server does not show the end of the report"
                raise TimeoutError(msg)
            _tell(Event("done", REPORT))
        if WORKSPACE in wanted and state.workspace is None:
            from batchscape.tracking.workspace import save_workspace

            _tell(Event("begin", WORKSPACE))
            state.workspace = save_workspace(state)
            state.write(self._sweep)
            _tell(Event("done", WORKSPACE))

    def _place(self) -> WandbTracker:
        """Return where the report belongs: to the runs that W&B has, else where they would go."""
        folders = self._sweep.run_folders()
        for folder in folders:
            if (state := MirrorState.read(folder)) is not None:
                return WandbTracker(name="wandb", project=state.project, entity=state.entity)
        return self._tracker_of(next(f for f in folders if f.config.exists()))

    def _look_at(self, folder: RunFolder) -> None:
        written = folder.status.stat().st_mtime_ns
        # Most runs of a long sweep are over: their files are read once.
        if self._settled.get(folder.path) == written:
            return
        try:
            is_settled = self._visit(folder)
        except RecordError as error:
            _tell(Event("damaged", folder.path.name, str(error)))
            is_settled = True
        except Exception as error:
            if self._order.live:
                raise  # a fresh process goes on with the runs that are open
            _tell(Event("damaged", folder.path.name, _said(error)))
            is_settled = self.has_failed = True
        if is_settled:
            self._settled[folder.path] = written

    def _visit(self, folder: RunFolder) -> bool:
        """Mirror what is new in one run folder; return whether that is all until it changes."""
        status, name = RunStatus.read(folder.status), folder.path.name
        if status.status is Status.RUNNING and self._order.live:
            if folder.path not in self._open:
                self._open[folder.path] = self._opened(folder, status)
            self._open[folder.path].follow()
            return False
        if status.status not in MIRRORED_STATUSES or not self._lacks(folder, status):
            return True
        _tell(Event("begin", name))
        run = self._open.pop(folder.path, None) or self._opened(folder, status)
        if not run.close(status):
            msg = f"the server does not show the end of {name}"
            raise TimeoutError(msg)
        _tell(Event("done", name))
        return True

    def _lacks(self, folder: RunFolder, status: RunStatus) -> bool:
        state = MirrorState.read(folder)
        if state is None or not state.covers(status):
            return True
        return self._mode == "online" and not state.is_at_server(self._sweep.path)

    def _opened(self, folder: RunFolder, status: RunStatus) -> WandbRun:
        state = MirrorState.read(folder)
        if self._mode == "offline" and state is not None and state.is_cut_short_online:
            msg = f"{folder.path.name} was cut short online: W&B must be reachable to go on"
            raise RecordError(msg)
        return WandbRun(
            folder,
            self._sweep.path,
            self._tracker_of(folder),
            mode=self._mode,
            status=status,
            label=label_of(folder, self._sweep_id),
            sweep_id=self._sweep_id,
            patience_s=patience_s(),
        )

    def _tracker_of(self, folder: RunFolder) -> WandbTracker:
        tracker = RunSpec.read(folder.config).config.tracker
        stored = tracker if isinstance(tracker, WandbTracker) else WandbTracker(name="wandb")
        chosen = self._order
        return WandbTracker(
            name="wandb",
            project=chosen.project or stored.project,
            entity=chosen.entity or stored.entity,
            tags=stored.tags if chosen.tags is None else chosen.tags,
        )


def _hold(lock: IO[str], *, waits: bool) -> None:
    """Hold the lock of what mirrors a sweep; it goes with the process, however that ends."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _RefusedError(_BUSY) from None
    except OSError as error:
        if not has_no_locks(error):  # else nobody can be kept out
            raise


def _mode(order: Order) -> Literal["online", "offline"]:
    """Decide between online and offline, and ask the server for an answer where it is online."""
    if order.mode == "offline":
        return "offline"
    knows_a_key = False
    with suppress(wandb.Error):
        # In the environment, in netrc, or in W&B's settings; nobody is asked.
        knows_a_key = bool(wandb.login(verify=False))
    if not knows_a_key:
        if order.mode == "auto":
            return "offline"
        raise _RefusedError(_NO_KEY)
    try:
        wandb.Api(timeout=math.ceil(patience_s()))
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        msg = (
            f"Weights & Biases cannot be used: {said}. Check the network, WANDB_BASE_URL, and the "
            "key (`wandb login --relogin`)"
        )
        raise _RefusedError(msg) from error
    _tell(Event("online"))
    return "online"


def _listen(asked: threading.Event) -> None:
    """Note that the end is asked for; end at once where who would ask is gone, and all waits."""
    parent = os.getppid()
    while os.getppid() == parent:
        if asked.is_set():
            time.sleep(1.0)
        elif select.select([sys.stdin], [], [], 1.0)[0]:
            asked.set()
    kill_tree(os.getpid())


def _said(error: Exception) -> str:
    first = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"W&B cannot be written to: {first}"


def _tell(event: Event) -> None:
    if event.reason is not None:
        event = replace(event, reason=redact(visible(event.reason)))
    with _TELLING, suppress(OSError):  # of a full disk
        for file in (sys.stdout, sys.stderr) if event.reason is not None else (sys.stdout,):
            print(json.dumps(asdict(event)), file=file, flush=True)  # the latter is mirror.log


if __name__ == "__main__":
    main(sys.argv[1])
