"""What W&B has of each run, and of a report: `wandb.json` in its folder. Needs no wandb."""

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
from batchscape.record.status import RunStatus, Status
from batchscape.text import count_text, list_text
from batchscape.tracking.labels import sweep_id_of

ENDS = frozenset(Status) - {Status.PENDING, Status.RUNNING, Status.REJECTED}
"""Of a run that was launched: these are mirrored for good."""


@dataclass
class MirrorState:
    """Content of `wandb.json`: what W&B has of one run, or of the report of a sweep."""

    project: str
    """Project that the W&B run is in, for good."""
    entity: str | None
    """User or team that it belongs to; null: the key's default."""
    mode: Literal["online", "offline"] = "offline"
    """Where `content` is: at the server, or in a folder of W&B's own."""
    content: str | None = None
    """Digest of the end of the run, or of the report, that was mirrored last; null: none, or the
    upload was cut. Which rows the server has, it tells."""
    sweep_id: str | None = None
    """Of a sweep: what W&B calls it, which is the id of the W&B run of its report."""
    workspace: str | None = None
    """Of a sweep: address of the workspace that was saved for it."""

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
            msg = f"{folder.mirror} cannot be written: {error}"
            raise RecordError(msg) from error

    @classmethod
    def read(cls, folder: RunFolder | SweepFolder) -> MirrorState | None:
        """Read the state of a run, or of a report.

        None if nothing of it was mirrored, or the file is damaged or of another format version:
        the same W&B run goes on then.

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
    """The runs of a sweep by name, by what W&B has of them."""

    sweep_dir: Path
    uploaded: list[str] = field(default_factory=list)
    """The server has them as they ended."""
    offline: list[str] = field(default_factory=list)
    """Written offline as they ended, and not uploaded by `batchscape sync`."""
    lacking: list[str] = field(default_factory=list)
    """Ended, and neither of the two; damaged ones are among them."""
    open: list[str] = field(default_factory=list)
    """Marked as running, or not started."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Those that cannot be read, and why."""
    projects: set[str] = field(default_factory=set)
    lacks_report: bool = False
    """Whether there is a report that the server does not have as it is, of a sweep of which a run
    has begun: the report is called after that one."""
    lacks_workspace: bool = False
    """Whether a workspace can be saved for it, and was not."""

    def missing(self, because: str) -> str | None:
        """Say what was not mirrored, why, and how to get it later; None where all was.

        Parameters
        ----------
        because : str
            Empty where nothing is known to have gone wrong.
        """
        ended = len(self.uploaded) + len(self.offline) + len(self.lacking)
        if not self.lacking:
            return None
        why = because or "; ".join(self.damaged.values()) or "it could not go on there"
        return (
            f"Weights & Biases was not updated: it lacks {len(self.lacking)} of {ended} runs "
            f"({list_text(self.lacking, 'and', 3)}), because {why}. "
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


def standing_of(sweep_dir: Path) -> Uploads:
    """Find out what W&B has of a sweep, by the notes in its folder and its run folders."""
    uploads = Uploads(sweep_dir)
    sweep = SweepFolder(sweep_dir)
    noted = None
    with suppress(RecordError):  # told by whoever sends it
        noted = MirrorState.read(sweep)
    if (noted is not None and noted.sweep_id) or sweep_id_of(sweep.run_folders()):
        sent = None if noted is None else noted.content
        uploads.lacks_report = report_content(sweep) not in {None, sent}
        has_view = noted is not None and noted.workspace is not None
        uploads.lacks_workspace = _can_save_workspaces() and not has_view
    for folder in sweep.run_folders():
        name = folder.path.name
        if not folder.status.exists():
            continue
        try:
            status = RunStatus.read(folder.status)
            state = MirrorState.read(folder)
        except (RecordError, OSError) as error:
            uploads.damaged[name] = str(error)
            # What another version wrote is that version's to send.
            if isinstance(error, DamageError | OSError):
                uploads.lacking.append(name)
            continue
        if status.status in {Status.PENDING, Status.RUNNING}:
            uploads.open.append(name)
        if status.status not in ENDS:
            continue
        if state is None or state.content != content_of(status):
            uploads.lacking.append(name)
            continue
        uploads.projects.add(state.project)
        (uploads.uploaded if state.mode == "online" else uploads.offline).append(name)
    return uploads


def content_of(status: RunStatus) -> str:
    """Return a digest of how a run ended: its rows by their seal, its figures, its reason."""
    content = asdict(status)
    del content["updated_at"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def report_files(sweep: SweepFolder) -> list[Path]:
    """Return the files of the report of a sweep, by name; none where no page has been written.

    What a link leads to outside of the folder is left out, and `paper/`, where an author writes.
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
    """Return the name of the W&B run of a run: another one on each machine, and if begun anew.

    It follows from the run folder alone, so that no damage makes two W&B runs of one run.
    """
    began = repr([attempt.started_at for attempt in status.attempts[:1]])
    return f"{run_id}-{hashlib.sha256(began.encode()).hexdigest()[:8]}"


def sync_command(sweep_dir: Path) -> str:
    """Return the command that sends what W&B lacks of a sweep."""
    return shlex.join(["batchscape", "sync", str(sweep_dir)])


def _can_save_workspaces() -> bool:
    return importlib.util.find_spec("wandb_workspaces") is not None
