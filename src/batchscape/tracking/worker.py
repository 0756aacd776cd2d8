"""The process that talks to Weights & Biases: `python -m batchscape.tracking.worker ORDER`.

It mirrors run folders, several at a time, then the report of the sweep, and reports each on its
standard output. The failure of one run leaves the others alone. W&B may fail or hang at any call:
the caller then starts another process, since only a fresh start of the W&B library is known to
work.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import wandb
from wandb.errors import AuthenticationError

from batchscape.config import WandbTracker
from batchscape.errors import RecordError
from batchscape.outgoing import make_printable, redact
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.locks import take
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status
from batchscape.record.tables import verify_seal
from batchscape.tracking.labels import label_of, sweep_id_of
from batchscape.tracking.mirror import Event, MirrorRequest, kill_tree, patience_s
from batchscape.tracking.report import send_report
from batchscape.tracking.run import WandbRun
from batchscape.tracking.state import MirrorState, digest_of_end

_POLL_S = 2.0
_RUNS_AT_ONCE = 8
"""Runs that are mirrored at a time; each waits for W&B most of the time."""
_EVENT_LOCK = threading.Lock()
"""Held while a thread writes its line."""
_NO_KEY = "no API key is known; `wandb login` or WANDB_API_KEY gives one"
_BUSY = "another process mirrors this sweep now, its launch or another sync; wait for its end"


class _RefusedError(Exception):
    """Nothing can be mirrored in this mode, with the reason."""


def main(text: str) -> None:
    """Mirror the runs of a sweep.

    Parameters
    ----------
    text : str
        A `MirrorRequest`, as JSON.
    """
    request = MirrorRequest(**json.loads(text))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        with ExitStack() as stack:
            path = SweepFolder(Path(request.sweep_dir)).wandb / "mirror.lock"
            while (lock := take(path, is_needed=False)) is None:
                # Meanwhile the process that has the lock sends the runs.
                if request.work != "live" or select.select([sys.stdin], [], [], _POLL_S)[0]:
                    raise _RefusedError(_BUSY)
            stack.callback(lock.release)
            mirror = _WandbMirror(request, _mode(request))
            while request.work == "live" and not select.select([sys.stdin], [], [], _POLL_S)[0]:
                mirror.mirror_runs()
            mirror.mirror_runs()
            mirror.send_sweep_parts()
            if not mirror.has_failed:  # else W&B could hang
                # Another launcher's mirror goes on with its runs that still train.
                wandb.teardown(exit_code=1)
    except _RefusedError as error:
        _send_event(Event("refused", reason=str(error)))
    except Exception as error:  # noqa: BLE001  (W&B raises errors of many families)
        _send_event(Event("refused", reason=_one_line(error)))
    else:
        _send_event(Event("end"))
    kill_tree(os.getpid())


class _WandbMirror:
    """The runs of one sweep, and those that are open in W&B."""

    def __init__(self, request: MirrorRequest, mode: Literal["online", "offline"]) -> None:
        self._request = request
        self._sweep = SweepFolder(Path(request.sweep_dir))
        self._mode = mode
        self._open: dict[Path, WandbRun] = {}
        self._finished_at: dict[Path, int] = {}
        self._sweep_id = ""
        self.has_failed = False
        """Whether W&B has failed for a run."""

    def mirror_runs(self) -> None:
        """Mirror the new rows and ends of all runs."""
        folders = [folder for folder in self._sweep.run_folders() if folder.status.exists()]
        if not self._sweep_id:
            state = MirrorState.read(self._sweep)
            stored_id = None if state is None else state.sweep_id
            self._sweep_id = stored_id or sweep_id_of(folders)
        if not self._sweep_id:
            return
        with ThreadPoolExecutor(_RUNS_AT_ONCE) as pool:
            list(pool.map(self._mirror_run, folders))
        if MirrorState.read(self._sweep) is None and (run := self._first_state()) is not None:
            # The id is kept, as the run that it derives from may be deleted.
            MirrorState(run.project, run.entity, sweep_id=self._sweep_id).write(self._sweep)

    def send_sweep_parts(self) -> None:
        """Send the requested parts of the sweep itself, if a run of it has begun."""
        parts, state = self._request.sweep_parts, MirrorState.read(self._sweep)
        if not parts or not self._sweep_id:
            return
        if state is None:
            # The report is in the project of the runs that W&B has, else where they would go.
            destination: MirrorState | WandbTracker | None = self._first_state()
            if destination is None:
                folders = self._sweep.run_folders()
                destination = self._wandb_settings(
                    next(run for run in folders if run.config.exists())
                )
            state = MirrorState(destination.project, destination.entity, sweep_id=self._sweep_id)
        if "report" in parts:
            send_report(self._sweep, state)
            _send_event(Event("done", "report"))
        if "workspace" in parts:
            from batchscape.tracking.workspace import save_workspace

            state.workspace = save_workspace(state)
            state.write(self._sweep)
            _send_event(Event("done", "workspace"))

    def _first_state(self) -> MirrorState | None:
        """Return the state of the first run that W&B has."""
        states = (MirrorState.read(folder) for folder in self._sweep.run_folders())
        return next((state for state in states if state is not None), None)

    def _mirror_run(self, folder: RunFolder) -> None:
        """Mirror the new rows or the end of a run, if it has changed since its end was mirrored."""
        status_time_ns, name = folder.status.stat().st_mtime_ns, folder.path.name
        # Files of a run that is over are read once.
        if self._finished_at.get(folder.path) == status_time_ns:
            return
        try:
            status = RunStatus.read(folder.status)
            if status.status is Status.RUNNING and self._request.work == "live":
                self._open_run(folder, status).follow()
                return
            if status.status.ended_after_launch and self._lacks(folder, status):
                verify_seal(folder, status)  # before it is opened in W&B
                self._open_run(folder, status).close(status)
                _send_event(Event("done", name))
        except RecordError as error:
            _send_event(Event("failed", name, str(error)))
        except Exception as error:  # noqa: BLE001  (W&B raises errors of many families)
            _send_event(Event("failed", name, _one_line(error)))
            self.has_failed = True
        self._open.pop(folder.path, None)
        self._finished_at[folder.path] = status_time_ns

    def _lacks(self, folder: RunFolder, status: RunStatus) -> bool:
        state = MirrorState.read(folder)
        if state is None or state.content != digest_of_end(status):
            return True
        return self._mode == "online" and state.mode == "offline"

    def _open_run(self, folder: RunFolder, status: RunStatus) -> WandbRun:
        if folder.path not in self._open:
            self._open[folder.path] = WandbRun(
                folder,
                self._sweep.path,
                self._wandb_settings(folder),
                mode=self._mode,
                status=status,
                label=label_of(folder, self._sweep_id),
                sweep_id=self._sweep_id,
                tell_rows=lambda: _send_event(Event("rows")),
            )
        return self._open[folder.path]

    def _wandb_settings(self, folder: RunFolder) -> WandbTracker:
        """Return a run's W&B settings; those of the request replace its own."""
        tracker = RunSpec.read(folder.config).config.tracker
        run_tracker = tracker if isinstance(tracker, WandbTracker) else WandbTracker(name="wandb")
        request = self._request
        return WandbTracker(
            name="wandb",
            project=request.project or run_tracker.project,
            entity=request.entity or run_tracker.entity,
            tags=run_tracker.tags if request.tags is None else request.tags,
        )


def _mode(request: MirrorRequest) -> Literal["online", "offline"]:
    """Decide between online and offline; test the connection where it is online."""
    if request.mode == "offline":
        return "offline"
    has_key = False
    try:
        # A key in the environment, in netrc, or in the settings of W&B; no prompt appears.
        has_key = bool(wandb.login(verify=False))
    except AuthenticationError as error:
        raise _RefusedError(f"{error} `wandb login` or WANDB_API_KEY gives another") from None
    except wandb.Error:
        pass
    if not has_key:
        if request.mode == "auto":
            return "offline"
        raise _RefusedError(_NO_KEY)
    try:
        wandb.Api(timeout=round(patience_s()) or 1)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise _RefusedError(
            f"Weights & Biases cannot be used: {reason}. Check the network, WANDB_BASE_URL, and "
            "the key (`wandb login --relogin`)"
        ) from error
    return "online"


def _end_with_parent(parent: int) -> None:
    """End once the parent is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    kill_tree(os.getpid())


def _one_line(error: Exception) -> str:
    first_line = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"W&B cannot be written to: {first_line}"


def _send_event(event: Event) -> None:
    if event.reason is not None:
        event = replace(event, reason=redact(make_printable(event.reason)))
    with _EVENT_LOCK, suppress(OSError):  # of a full disk
        for file in (sys.stdout, sys.stderr) if event.reason is not None else (sys.stdout,):
            print(json.dumps(asdict(event)), file=file, flush=True)  # the latter is mirror.log


if __name__ == "__main__":
    main(sys.argv[1])
