"""The state of each run and each report in W&B: `wandb.json` in its folder. Needs no wandb."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shlex
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from batchscape.errors import DamageError, RecordError
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import FORMAT_VERSION, RunFolder, SweepFolder
from batchscape.record.status import RunStatus
from batchscape.text import count_text, list_text
from batchscape.tracking.labels import sweep_id_of


@dataclass
class MirrorState:
    """Content of `wandb.json`: the state of one run, or of the report of a sweep, in W&B."""

    project: str
    """Project of the W&B run, which does not change."""
    entity: str | None
    """User or team of the project; null: the default of the key."""
    mode: Literal["online", "offline"] = "offline"
    """Whether `content` is at the server, or in an offline folder of W&B."""
    content: str | None = None
    """Digest of the end of the run, or of the report, that was mirrored last; null: none, or the
    upload was cut. The server knows which rows it has."""
    sweep_id: str | None = None
    """Id of a sweep in W&B, also of the W&B run of its report."""
    workspace: str | None = None
    """Address of the saved workspace of a sweep."""

    def write(self, folder: RunFolder | SweepFolder) -> None:
        """Replace the state of a run, or of a report.

        Raises
        ------
        RecordError
            If it cannot be written.
        """
        try:
            write_json(folder.mirror, {"format_version": FORMAT_VERSION, **asdict(self)})
        except OSError as error:
            raise RecordError(f"{folder.mirror} cannot be written: {error}") from error

    @classmethod
    def read(cls, folder: RunFolder | SweepFolder) -> MirrorState | None:
        """Read the state of a run, or of a report.

        None where there is none, or the file is damaged or of another format version: the same
        W&B run goes on then.

        Raises
        ------
        RecordError
            If the file cannot be read.
        """
        if not folder.mirror.exists():
            return None
        try:
            content = read_json(folder.mirror)
            return cls(**content) if content.pop("format_version") == FORMAT_VERSION else None
        except (DamageError, KeyError, TypeError):
            return None


@dataclass
class Uploads:
    """The runs of a sweep by their states in W&B."""

    sweep_dir: Path
    uploaded: list[str] = field(default_factory=list)
    """Runs whose ends the server has."""
    offline: list[str] = field(default_factory=list)
    """Runs whose ends are written offline, and not uploaded by `batchscape sync`."""
    missing_runs: list[str] = field(default_factory=list)
    """Other runs that have ended, damaged ones included."""
    open: list[str] = field(default_factory=list)
    """Runs that are running or pending."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Reasons of runs that cannot be read."""
    projects: set[str] = field(default_factory=set)
    lacks_report: bool = False
    """Whether the server lacks the report in its current state; False before a run of the sweep has
    begun, by which the report is named."""
    lacks_workspace: bool = False
    """Whether a workspace can be saved, and is not."""

    def missing_runs_note(self, reason: str) -> str | None:
        """Say which runs were not mirrored, why, and how to send them; None where all were.

        Parameters
        ----------
        reason : str
            Why they were not mirrored; empty where it is not known.
        """
        ended_count = len(self.uploaded) + len(self.offline) + len(self.missing_runs)
        if not self.missing_runs:
            return None
        reason_text = reason or "; ".join(self.damaged.values()) or "it could not go on there"
        return (
            f"Weights & Biases was not updated: it lacks {len(self.missing_runs)} of {ended_count} "
            f"runs ({list_text(self.missing_runs, 'and', 3)}), because {reason_text}. "
            f"`{sync_command(self.sweep_dir)}` sends what it lacks. "
            f"Details: {SweepFolder(self.sweep_dir).wandb / 'mirror.log'}"
        )

    def __str__(self) -> str:
        """Say how many runs W&B has, where, and how offline ones are uploaded; empty for none."""
        runs = len(self.uploaded) + len(self.offline)
        if not runs:
            return ""
        projects = ", ".join(sorted(self.projects))
        where = f"Weights & Biases: {count_text(runs, 'run')} in project {projects}"
        upload = f"; {len(self.offline)} offline, upload: {sync_command(self.sweep_dir)}"
        return where + upload if self.offline else where


def uploads_of(sweep_dir: Path) -> Uploads:
    """Return the states of the runs of a sweep in W&B, by the files in its folders."""
    uploads = Uploads(sweep_dir)
    sweep = SweepFolder(sweep_dir)
    report_state = None
    with suppress(RecordError):  # the process that sends the report reports the error
        report_state = MirrorState.read(sweep)
    if (report_state is not None and report_state.sweep_id) or sweep_id_of(sweep.run_folders()):
        sent = None if report_state is None else report_state.content
        uploads.lacks_report = report_content(sweep) not in {None, sent}
        has_workspace = report_state is not None and report_state.workspace is not None
        uploads.lacks_workspace = can_save_workspaces() and not has_workspace
    for folder in sweep.run_folders():
        name = folder.path.name
        if not folder.status.exists():
            continue
        try:
            status = RunStatus.read(folder.status)
            state = MirrorState.read(folder)
        except (RecordError, OSError) as error:
            uploads.damaged[name] = str(error)
            # A run of another format version is sent by that version.
            if isinstance(error, DamageError | OSError):
                uploads.missing_runs.append(name)
            continue
        if not status.status.has_end:
            uploads.open.append(name)
        if not status.status.ended_after_launch:
            continue
        if state is None or state.content != digest_of_end(status):
            uploads.missing_runs.append(name)
            continue
        uploads.projects.add(state.project)
        (uploads.uploaded if state.mode == "online" else uploads.offline).append(name)
    return uploads


def digest_of_end(status: RunStatus) -> str:
    """Return a digest of the end of a run: its rows by their seal, its figures, its reason."""
    content = asdict(status)
    del content["updated_at"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def report_files(sweep: SweepFolder) -> list[Path]:
    """Return the files of the report of a sweep, by name; none where no page has been written.

    Links to files outside of the folder are left out, and `paper/`, which an author edits.
    """
    root = sweep.report.resolve()
    if not (root / "report.html").is_file():
        return []
    files = (path for path in root.rglob("*") if path.is_file())
    return sorted(
        path
        for path in files
        if path.resolve().is_relative_to(root) and path.relative_to(root).parts[0] != "paper"
    )


def report_content(sweep: SweepFolder) -> str | None:
    """Return a digest of the files of the report of a sweep; None where there is none."""
    files = report_files(sweep)
    digest = hashlib.sha256()
    for path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{content} {path.relative_to(sweep.report.resolve())}\n".encode())
    return digest.hexdigest() if files else None


def id_of(run_id: str, status: RunStatus) -> str:
    """Return the id of the W&B run of a run.

    It follows from the run folder and the first start: it is the same after damage, and another on
    another machine or after a new begin.
    """
    first_start = repr([attempt.started_at for attempt in status.attempts[:1]])
    return f"{run_id}-{hashlib.sha256(first_start.encode()).hexdigest()[:8]}"


def sync_command(sweep_dir: Path) -> str:
    """Return the command that sends what W&B lacks of a sweep."""
    return shlex.join(["batchscape", "sync", str(sweep_dir)])


def can_save_workspaces() -> bool:
    """Whether the library is installed that saves workspaces."""
    return importlib.util.find_spec("wandb_workspaces") is not None
