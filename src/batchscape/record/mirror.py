"""Weights & Biases, seen from the launcher: a process of its own mirrors the run folders.

The launcher starts the process and ends it; training processes never hear of it. It reads what
any reader could read, at low priority, and keeps what it has done in `wandb.json` of each run
folder, so that it may be killed at any time and goes on at its next start. The part that talks
to W&B is in `record.mirror_process` and `record.wandb_run`; this one does not import wandb.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from batchscape.config import WandbTracker
from batchscape.credentials import redact
from batchscape.errors import RecordError
from batchscape.record.folder import SweepFolder
from batchscape.record.mirror_state import (
    GIVING_UP,
    MIRRORED_STATUSES,
    MirrorState,
    progress_sign,
    sync_command,
    wandb_folder,
)
from batchscape.record.status import RunStatus

__all__ = ["MirrorProcess", "kill_tree", "mirror_log", "start", "wandb_environment"]


class MirrorProcess:
    """A running mirror of one sweep.

    Parameters
    ----------
    process : Popen
        It ends by itself when its standard input ends, which the death of its parent also does.
    sweep_dir : Path
    """

    def __init__(self, process: subprocess.Popen[bytes], sweep_dir: Path) -> None:
        self._process = process
        self._sweep_dir = sweep_dir
        self._was_killed = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def has_failed(self) -> bool:
        """Whether it has ended by itself before its work was done."""
        return self._process.poll() not in {None, 0} and not self._was_killed

    def finish(self, timeout_s: float, stall_s: float = math.inf) -> str | None:
        """Let it mirror what is left, and wait for its end; it is killed if that takes too long.

        Parameters
        ----------
        timeout_s : float
            Longest time to wait, in seconds.
        stall_s : float
            Longest time to wait without any progress, in seconds.

        Returns
        -------
        str or None
            None if W&B has, or has on disk where offline was asked for, every run that ended.
            Else what is missing, why, and how to get it later.
        """
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with suppress(OSError):
                # A byte, because a forked relative may hold the pipe open.
                stdin.write(b"\n")
                stdin.flush()
            with suppress(OSError):
                stdin.close()
        cause = self._wait(timeout_s, stall_s)
        if cause is None and (code := self._process.returncode):
            cause = f"the mirror ended with exit code {code}"
        return _what_is_missing(self._sweep_dir, cause)

    def _wait(self, timeout_s: float, stall_s: float) -> str | None:
        """Wait for its end; return why it was killed, None where it ended by itself."""
        began = moved = time.monotonic()
        sign = _changed_at(self._sweep_dir)
        while True:
            # What it is asked for last is whether it has ended: a bound of 0 s kills what runs.
            left = min(began + timeout_s, moved + stall_s) - time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(min(max(left, 0.0), _LOOK_S))
                return None
            now = time.monotonic()
            if (changed := _changed_at(self._sweep_dir)) != sign:
                sign, moved = changed, now
            if now - began >= timeout_s:
                cause = f"the mirror did not end within {timeout_s:g} s"
            elif now - moved >= stall_s:
                cause = f"the mirror showed no progress for {stall_s:g} s"
            else:
                continue
            self._was_killed = True
            kill_tree(self.pid)
            self._process.wait()
            return cause


def start(sweep_dir: Path, tracker: WandbTracker, *, live: bool) -> MirrorProcess:
    """Start to mirror the runs of a sweep to W&B, in a process of low priority.

    Parameters
    ----------
    sweep_dir : Path
        Folder of the sweep; all that W&B writes goes under its `wandb` folder.
    tracker : WandbTracker
    live : bool
        Whether to follow runs while they run, until `finish`. Else the runs that have ended, and
        are not mirrored yet, are mirrored once.

    Returns
    -------
    MirrorProcess
    """
    sweep_dir = sweep_dir.resolve()
    wandb_folder(sweep_dir).mkdir(parents=True, exist_ok=True)
    # -P: a module in the current folder must not stand in for one that wandb imports.
    command = [sys.executable, "-P", "-m", "batchscape.record.mirror_process", str(sweep_dir)]
    command += [json.dumps(asdict(tracker)), *(["--live"] if live else [])]
    with mirror_log(sweep_dir).open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=wandb_environment(sweep_dir, tracker),
            start_new_session=True,  # Ctrl-C is for the launcher, which then calls `finish`
        )
    # From here, before it has imported anything: a hook in the child is unsafe with threads.
    with suppress(psutil.Error):
        psutil.Process(process.pid).nice(19)
    return MirrorProcess(process, sweep_dir)


def mirror_log(sweep_dir: Path) -> Path:
    """Where what W&B says about a sweep goes."""
    return wandb_folder(sweep_dir) / "mirror.log"


def wandb_environment(sweep_dir: Path, tracker: WandbTracker) -> dict[str, str]:
    """Environment of the mirror: the user's, quiet, and leaving nothing outside the sweep."""
    environment = {
        "WANDB_CACHE_DIR": str(wandb_folder(sweep_dir) / "cache"),
        **os.environ,
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    environment.pop("WANDB_SERVICE", None)  # would tie it to a W&B process of the launcher
    if tracker.mode != "auto":
        environment.pop("WANDB_MODE", None)
    return environment


_LOOK_S = 1.0
_LOG_TAIL_BYTES = 8192


def kill_tree(pid: int) -> None:
    """Kill a process of ours and its descendants (W&B runs its own helper)."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def _last_words(sweep_dir: Path) -> str | None:
    """Return why the mirror gave up, by its log; None where it did not."""
    with suppress(OSError):
        with mirror_log(sweep_dir).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        for line in reversed(lines):
            if line.startswith(GIVING_UP):
                return line.removeprefix(GIVING_UP)
    return None


def _changed_at(sweep_dir: Path) -> int | None:
    try:
        return progress_sign(sweep_dir).stat().st_mtime_ns
    except OSError:
        return None


def _what_is_missing(sweep_dir: Path, cause: str | None) -> str | None:
    """Say which ended runs W&B does not have, and why: as the wait for it ended, if that tells."""
    ended, unsent, lacking = 0, 0, []
    damage: str | None = None
    problem: str | None = None
    for folder in SweepFolder(sweep_dir).run_folders():
        state: MirrorState | None = None
        if not folder.status.exists():
            continue
        try:
            status = RunStatus.read(folder.status)
            if status.status not in MIRRORED_STATUSES:
                continue
            state = MirrorState.read(folder)
        except RecordError as error:
            damage = str(error)
        ended += 1
        if state is None or not state.covers(status):
            lacking.append(folder.path.name)
        elif state.problem is not None and state.is_only_offline(sweep_dir):
            unsent, problem = unsent + 1, state.problem
    what = []
    if lacking:
        shown = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
        what.append(f"it lacks {len(lacking)} of {ended} runs ({shown})")
    if unsent:
        what.append(f"{unsent} of {ended} runs were written offline")
    if not what:
        return None
    why = cause or damage or problem or _last_words(sweep_dir) or "it could not go on there"
    return redact(
        f"Weights & Biases was not updated: {', and '.join(what)}, because {why}. "
        f"`{sync_command(sweep_dir)}` sends what it lacks. Details: {mirror_log(sweep_dir)}"
    )
