"""What W&B has of each run, and of a report: `wandb.json` in its folder. Needs no wandb."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shlex
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from batchscape.errors import DamageError, RecordError
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import FORMAT_VERSION, RunFolder, SweepFolder
from batchscape.record.status import RunStatus, Status, check_version
from batchscape.tracking.labels import sweep_id_of

__all__ = [
    "MIRRORED_STATUSES",
    "MirrorState",
    "Uploads",
    "content_of",
    "id_of",
    "report_content",
    "report_files",
    "standing_of",
    "sync_command",
]

MIRRORED_STATUSES = frozenset(Status) - {Status.PENDING, Status.RUNNING, Status.REJECTED}
"""Ends of a run that was launched: these are mirrored for good."""


@dataclass
class MirrorState:
    """Content of `wandb.json`: what W&B has of one run, or of the report of a sweep.

    Rows are named by their W&B step, 2k for optimizer step k and 2k + 1 for the evaluation after
    it: one number says which ones were mirrored, however often a run was resumed.
    """

    project: str
    """Project that the W&B run is in, for good."""
    entity: str | None
    """User or team that it belongs to; null: the key's default."""
    mode: Literal["online", "offline"] = "offline"
    """Where the rows up to `last_step` are: at the server, or in `segments`."""
    last_step: int = -1
    """W&B step of the last row that is certain to be there."""
    segments: list[str] = field(default_factory=list)
    """Folders that W&B wrote for the run offline, each whole, one after the other."""
    content: str | None = None
    """Digest of the end of the run, or of the report, that was mirrored last; null: none, or the
    upload was cut."""
    sweep_id: str | None = None
    """Of a sweep: what W&B calls it, which is the id of the W&B run of its report."""
    workspace: str | None = None
    """Of a sweep: address of the workspace that was saved for it."""

    @property
    def is_cut_short_online(self) -> bool:
        """Whether only the server knows which rows it has."""
        return self.mode == "online" and self.content is None

    def covers(self, status: RunStatus) -> bool:
        """Whether W&B has, or has on disk, all there is of a run that ended with `status`."""
        return self.content == content_of(status)

    def is_at_server(self, sweep_dir: Path) -> bool:
        """Whether the server has the rows up to `last_step`."""
        # Uploaded by hand: W&B marks each segment then. One that is gone proves nothing.
        segments = self._folders(sweep_dir)
        return self.mode == "online" or (bool(segments) and all(map(_is_marked, segments)))

    def mark_sent(self, sweep_dir: Path) -> None:
        """Mark the offline segments as uploaded, as `wandb sync` does and heeds."""
        for folder in self._folders(sweep_dir):
            for file in folder.glob("*.wandb"):
                file.with_name(f"{file.name}.synced").touch()

    def remove_strays(self, sweep_dir: Path, id_: str) -> None:
        """Remove offline segments that were cut short: their rows are written again, once."""
        for path in SweepFolder(sweep_dir).wandb.glob("offline-run-*"):
            is_ours = path.name.endswith(f"-{id_}") and not path.is_symlink()
            if is_ours and path.name not in self.segments and not _is_marked(path):
                shutil.rmtree(path, ignore_errors=True)

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

        None if nothing of it was mirrored, or the file is damaged.

        Without a state the run goes on where the server stands, so that nothing is sent twice.

        Raises
        ------
        RecordError
            If the file cannot be read, or is of another format version.
        """
        if not folder.mirror.exists():
            return None
        try:
            content = read_json(folder.mirror)
            check_version(folder.mirror, content)
            content.pop("format_version")
            return cls(**content)
        except (DamageError, TypeError):
            return None

    def _folders(self, sweep_dir: Path) -> list[Path]:
        return [SweepFolder(sweep_dir).wandb / name for name in self.segments]


@dataclass
class Uploads:
    """The runs of a sweep by name, by what W&B has of them."""

    sweep_dir: Path
    uploaded: list[str] = field(default_factory=list)
    """The server has them as they ended."""
    offline: list[str] = field(default_factory=list)
    """Written offline as they ended, and not uploaded."""
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
        shown = ", ".join(self.lacking[:3]) + (", ..." if len(self.lacking) > 3 else "")
        why = because or "; ".join(self.damaged.values()) or "it could not go on there"
        return (
            f"Weights & Biases was not updated: it lacks {len(self.lacking)} of {ended} runs "
            f"({shown}), because {why}. "
            f"`{sync_command(self.sweep_dir)}` sends what it lacks. "
            f"Details: {SweepFolder(self.sweep_dir).wandb / 'mirror.log'}"
        )

    def __str__(self) -> str:
        """Say how many runs W&B has, where, and how offline ones are uploaded; empty for none."""
        runs = len(self.uploaded) + len(self.offline)
        if not runs:
            return ""
        said = f"Weights & Biases: {runs} runs in project {', '.join(sorted(self.projects))}"
        upload = f"; {len(self.offline)} offline, upload: {sync_command(self.sweep_dir)}"
        return said + upload if self.offline else said


def standing_of(sweep_dir: Path) -> Uploads:
    """Find out what W&B has of a sweep, by the notes in its folder and its run folders."""
    found = Uploads(sweep_dir)
    sweep = SweepFolder(sweep_dir)
    noted = None
    with suppress(RecordError):  # told by whoever sends it
        noted = MirrorState.read(sweep)
    content = report_content(sweep)
    if (noted is not None and noted.sweep_id) or sweep_id_of(sweep.run_folders()):
        found.lacks_report = content is not None and (noted is None or noted.content != content)
        has_view = noted is not None and noted.workspace is not None
        found.lacks_workspace = _can_save_workspaces() and not has_view
    for folder in sweep.run_folders():
        name = folder.path.name
        if not folder.status.exists():
            continue
        try:
            status = RunStatus.read(folder.status)
            state = MirrorState.read(folder)
        except (RecordError, OSError) as error:
            found.damaged[name] = str(error)
            found.lacking.append(name)
            continue
        if status.status in {Status.PENDING, Status.RUNNING}:
            found.open.append(name)
        if status.status not in MIRRORED_STATUSES:
            continue
        if state is None or not state.covers(status):
            found.lacking.append(name)
            continue
        found.projects.add(state.project)
        (found.uploaded if state.is_at_server(sweep_dir) else found.offline).append(name)
    return found


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


def _is_marked(segment: Path) -> bool:
    return any(segment.glob("*.wandb.synced"))


def _can_save_workspaces() -> bool:
    return importlib.util.find_spec("wandb_workspaces") is not None
