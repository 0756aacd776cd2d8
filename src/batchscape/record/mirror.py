"""Weights & Biases, seen from the launcher: a process of its own mirrors the run folders.

The launcher starts the process and ends it; training processes never hear of it. It reads what
any reader could read, at low priority, and keeps what it has done in `wandb.json` of each run
folder, so that it may be killed at any time and goes on at its next start. The part that talks
to W&B is in `record.mirror_process` and `record.wandb_run`; this one does not import wandb.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from batchscape.config import WandbTracker
from batchscape.errors import RecordError
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import FORMAT_VERSION, RunFolder, SweepFolder
from batchscape.record.status import RunStatus, Status, check_version

__all__ = [
    "MIRRORED_STATUSES",
    "MirrorProcess",
    "MirrorState",
    "describe_standing",
    "start",
    "wandb_folder",
]

MIRRORED_STATUSES = frozenset(Status) - {Status.PENDING, Status.RUNNING, Status.REJECTED}
"""Ends of a run that was launched: these are mirrored for good."""


@dataclass
class MirrorState:
    """Content of `wandb.json`: what W&B has of one run.

    Rows are kept apart by their W&B step, 2k for optimizer step k and 2k + 1 for the evaluation
    after it: one number says which ones were mirrored, however often a run was resumed.
    """

    id: str
    """Names the W&B run. Drawn once, so that equal folders on two machines do not collide."""
    project: str
    """Project that the W&B run is in, for good."""
    entity: str | None
    """User or team that it belongs to; null: the key's default."""
    mode: str
    """`online` or `offline`: how the latest segment was written."""
    last_step: int = -1
    """W&B step of the last row in a closed segment."""
    segments: list[str] = field(default_factory=list)
    """Folders that W&B wrote for the run, one a start, beside each other."""
    closed: bool = True
    """Whether the last segment is whole; one that is not is written again."""
    status: str | None = None
    """Status that was mirrored last."""
    attempts: int = 0
    """Attempts that the run had then."""
    problem: str | None = None
    """Why the run was written offline although it was meant to be online."""

    def covers(self, status: RunStatus) -> bool:
        """Whether W&B has all there is of a run that ended with `status`."""
        return self.closed and (self.status, self.attempts) == (
            str(status.status),
            len(status.attempts),
        )

    def unsent(self, sweep_dir: Path) -> list[Path]:
        """Segments that were written offline and that `wandb sync` has not marked as sent."""
        offline = [name for name in self.segments if name.startswith("offline-")]
        folders = [wandb_folder(sweep_dir) / name for name in offline]
        return [path for path in folders if path.is_dir() and not any(path.glob("*.synced"))]

    def write(self, folder: RunFolder) -> None:
        """Replace the state of a run."""
        write_json(folder.mirror, {"format_version": FORMAT_VERSION, **asdict(self)})

    @classmethod
    def read(cls, folder: RunFolder) -> MirrorState | None:
        """Read the state of a run; None if nothing of it was mirrored.

        Raises
        ------
        RecordError
            If the file is damaged, or of another format version.
        """
        if not folder.mirror.exists():
            return None
        content = read_json(folder.mirror)
        check_version(folder.mirror, content)
        content.pop("format_version")
        try:
            return cls(**content)
        except TypeError as error:
            msg = f"{folder.mirror} is damaged: {error}"
            raise RecordError(msg) from None


def describe_standing(sweep: SweepFolder) -> str | None:
    """Say how many runs W&B has, where, and how offline ones are uploaded; None for none."""
    states = []
    for folder in sweep.run_folders():
        with suppress(RecordError):
            if (state := MirrorState.read(folder)) is not None:
                states.append(state)
    if not states:
        return None
    unsent = sum(bool(state.unsent(sweep.path)) for state in states)
    projects = ", ".join(sorted({state.project for state in states}))
    said = f"Weights & Biases: {len(states)} runs in project {projects}"
    if not unsent:
        return said
    return f"{said}; {unsent} offline, upload: wandb sync {wandb_folder(sweep.path)}/offline-run-*"


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

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def finish(self, timeout_s: float) -> str | None:
        """Let it mirror what is left, and wait for its end; it is killed after `timeout_s`.

        Parameters
        ----------
        timeout_s : float
            Longest time to wait, in seconds.

        Returns
        -------
        str or None
            None if W&B has, or has on disk where offline was asked for, every run that ended.
            Else what is missing, why, and how to get it later.
        """
        cause = f"the mirror did not end within {timeout_s:g} s"
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with suppress(OSError):
                # A byte, because a forked relative may hold the pipe open.
                stdin.write(b"\n")
                stdin.flush()
            with suppress(OSError):
                stdin.close()
        try:
            code = self._process.wait(timeout_s)
            cause = (
                f"the mirror ended with exit code {code}" if code else "it could not go on there"
            )
        except subprocess.TimeoutExpired:
            _kill_tree(self.pid)
            self._process.wait()
        return _what_is_missing(self._sweep_dir, cause)


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
    with _log(sweep_dir).open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=_environment(sweep_dir, tracker),
            start_new_session=True,  # Ctrl-C is for the launcher, which then calls `finish`
        )
    # From here, before it has imported anything: a hook in the child is unsafe with threads.
    with suppress(psutil.Error):
        psutil.Process(process.pid).nice(19)
    return MirrorProcess(process, sweep_dir)


def wandb_folder(sweep_dir: Path) -> Path:
    """Folder that holds everything W&B writes for a sweep."""
    return sweep_dir / "wandb"


def _log(sweep_dir: Path) -> Path:
    return wandb_folder(sweep_dir) / "mirror.log"


def _environment(sweep_dir: Path, tracker: WandbTracker) -> dict[str, str]:
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


def _kill_tree(pid: int) -> None:
    """Kill a process of ours and its descendants (W&B runs its own helper)."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def _what_is_missing(sweep_dir: Path, cause: str) -> str | None:
    ended, missing, unsent = 0, [], 0
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
            cause = str(error)
        ended += 1
        if state is None or not state.covers(status):
            missing.append(folder.path.name)
        elif state.problem is not None and state.unsent(sweep_dir):
            unsent, problem = unsent + 1, state.problem
    parts: list[str] = []
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        parts.append(
            f"Weights & Biases lacks {len(missing)} of {ended} runs ({shown}): {cause}. "
            f"The same command mirrors them when it is run again. Details: {_log(sweep_dir)}"
        )
    if unsent:
        parts.append(
            f"{unsent} of {ended} runs were written for Weights & Biases offline, because "
            f"{problem}. Upload them with: wandb sync {wandb_folder(sweep_dir)}/offline-run-*"
        )
    return " ".join(parts) or None
