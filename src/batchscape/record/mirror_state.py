"""What W&B has of each run: `wandb.json` in its folder. Needs no wandb to be read."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shlex
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from batchscape.errors import DamageError, RecordError
from batchscape.record.containment import is_plain_name
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import FORMAT_VERSION, RunFolder, SweepFolder
from batchscape.record.status import RunStatus, Status, check_version

__all__ = [
    "GIVING_UP",
    "MIRRORED_STATUSES",
    "MirrorState",
    "content_of",
    "describe_standing",
    "id_of",
    "progress_sign",
    "sync_command",
    "wandb_folder",
]

_DIGESTED = ("status", "stop_reason", "reason", "rank", "attempts", "summary", "seal")
_DIGESTED_ATTEMPT = ("started_at", "from_optimizer_step", "ended_at", "status", "reason")
"""What names the content of a run: no later field may make an old run look like another one."""

GIVING_UP = "giving up: "
"""Begins the line of the mirror's log that says why it went on offline, or ended."""

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
    """Whether the last segment is whole, and has arrived if it is online; else it is repeated."""
    status: str | None = None
    """Status that was mirrored last."""
    attempts: int = 0
    """Attempts that the run had then."""
    problem: str | None = None
    """Why the run was written offline although it was meant to be online."""
    content: str | None = None
    """Digest of the end of the run that was mirrored last; null in files of older versions."""
    uploaded_step: int = -1
    """W&B step of the last row that the server is known to have: noted once it showed an end."""

    def covers(self, status: RunStatus) -> bool:
        """Whether W&B has, or has on disk, all there is of a run that ended with `status`."""
        mirrored = self.status, self.attempts, self.content or content_of(status)
        ended = str(status.status), len(status.attempts), content_of(status)
        return self.closed and mirrored == ended

    def is_uploaded(self, status: RunStatus, sweep_dir: Path) -> bool:
        """Whether the server has all there is of a run that ended with `status`."""
        if not self.covers(status):
            return False
        if self.mode == "online":
            return self.uploaded_step >= self.last_step
        # Uploaded by hand: W&B marks each segment then. One that is gone proves nothing.
        offline = self._offline(sweep_dir)
        return bool(offline) and all(_is_marked(path) for path in offline)

    def is_only_offline(self, sweep_dir: Path) -> bool:
        """Whether the latest that is known of the run was never uploaded, wherever that is now."""
        offline = self._offline(sweep_dir)
        return self.mode == "offline" and not all(_is_marked(path) for path in offline)

    def forget_strays(self, sweep_dir: Path) -> None:
        """Remove offline segments that are not in this state: nobody came to note them.

        Their rows are written again, in a segment that is noted.
        """
        for path in wandb_folder(sweep_dir).glob(f"offline-run-*-{self.id}"):
            if path.name not in self.segments and not path.is_symlink() and not _is_marked(path):
                shutil.rmtree(path, ignore_errors=True)

    def unsent(self, sweep_dir: Path) -> list[Path]:
        """Segments that were written offline and are not marked as uploaded."""
        offline = [path for path in self._offline(sweep_dir) if path.is_dir()]
        return [path for path in offline if not _is_marked(path)]

    def mark_sent(self, sweep_dir: Path) -> None:
        """Mark the offline segments as uploaded, as `wandb sync` does and heeds."""
        for path in self.unsent(sweep_dir):
            for file in path.glob("*.wandb"):
                file.with_name(f"{file.name}.synced").touch()

    def write(self, folder: RunFolder) -> None:
        """Replace the state of a run.

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
    def read(cls, folder: RunFolder) -> MirrorState | None:
        """Read the state of a run; None if nothing of it was mirrored.

        Raises
        ------
        RecordError
            If the file is damaged, or of another format version.
        """
        if not folder.mirror.exists():
            return None
        try:
            return cls._checked(folder)
        except DamageError as error:
            msg = (
                f"{error}. Delete this file; then `{sync_command(folder.path.parents[1])}` goes on "
                "with the same run of Weights & Biases"
            )
            raise DamageError(msg) from None

    @classmethod
    def _checked(cls, folder: RunFolder) -> MirrorState:
        content = read_json(folder.mirror)
        check_version(folder.mirror, content)
        content.pop("format_version")
        try:
            state = cls(**content)
            names = [state.id, *state.segments]
        except TypeError as error:
            msg = f"{folder.mirror} is damaged: {error}"
            raise DamageError(msg) from None
        # Folders of these names are removed where they are incomplete.
        if (strange := next((name for name in names if not is_plain_name(name)), None)) is not None:
            msg = f"{folder.mirror} is damaged: {strange!r} is no name of a W&B run or folder"
            raise DamageError(msg)
        return state

    def _offline(self, sweep_dir: Path) -> list[Path]:
        offline = [name for name in self.segments if name.startswith("offline-")]
        return [wandb_folder(sweep_dir) / name for name in offline]


def content_of(status: RunStatus) -> str:
    """Return a digest of how a run ended: its rows by their seal, its figures, its reason."""
    plain = asdict(status)
    content = {name: plain[name] for name in _DIGESTED}
    content["attempts"] = [
        {name: attempt[name] for name in _DIGESTED_ATTEMPT} for attempt in plain["attempts"]
    ]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def describe_standing(sweep: SweepFolder) -> str | None:
    """Say how many runs W&B has, where, and how offline ones are uploaded; None for none."""
    states = []
    for folder in sweep.run_folders():
        with suppress(RecordError):
            if (state := MirrorState.read(folder)) is not None:
                states.append(state)
    if not states:
        return None
    unsent = sum(state.is_only_offline(sweep.path) for state in states)
    projects = ", ".join(sorted({state.project for state in states}))
    said = f"Weights & Biases: {len(states)} runs in project {projects}"
    return f"{said}; {unsent} offline, upload: {sync_command(sweep.path)}" if unsent else said


def sync_command(sweep_dir: Path) -> str:
    """Return the command that sends what W&B lacks of a sweep."""
    return shlex.join(["batchscape", "sync", str(sweep_dir)])


def id_of(sweep_dir: Path, run_id: str) -> str:
    """Return the name of the W&B run of a run that has no state: a new one, unless it had one.

    Where its state was deleted, the folders that W&B wrote for it still carry the name. Where its
    folder was set aside as damaged, the W&B run of that name is of the damaged one: steps that it
    has would be skipped.

    Parameters
    ----------
    sweep_dir : Path
        Folder of the sweep.
    run_id : str
    """
    drawn = f"{run_id}-{secrets.token_hex(4)}"
    set_aside = re.compile(rf"{re.escape(run_id)}-\d+")
    if any(set_aside.fullmatch(path.name) for path in SweepFolder(sweep_dir).damaged.glob("*")):
        return drawn
    segment = re.compile(rf"(?:offline-)?run-([0-9_]+)-({re.escape(run_id)}-[0-9a-f]{{8}})")
    folder = wandb_folder(sweep_dir)
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    found = [(match[1], match[2]) for name in names if (match := segment.fullmatch(name))]
    return max(found)[1] if found else drawn


def progress_sign(sweep_dir: Path) -> Path:
    """Lock of what mirrors a sweep; its time of change says when that last came further."""
    return wandb_folder(sweep_dir) / "mirror.lock"


def wandb_folder(sweep_dir: Path) -> Path:
    """Folder that holds everything W&B writes for a sweep."""
    return SweepFolder(sweep_dir).wandb


def _is_marked(segment: Path) -> bool:
    return any(segment.glob("*.wandb.synced"))
