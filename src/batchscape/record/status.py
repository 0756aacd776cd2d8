"""The status of a run, with its reason and its attempts (`status.json`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from batchscape.errors import DamageError, RecordError
from batchscape.record.causes import Cause
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import FORMAT_VERSION
from batchscape.record.instants import now


class Status(StrEnum):
    """Statuses of a run; the first two are those of a run without an end."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    OOM = "oom"
    DIVERGED = "diverged"
    TIMEOUT = "timeout"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    PRUNED = "pruned"
    REJECTED = "rejected"

    @property
    def is_open(self) -> bool:
        """Whether the same command goes on with the run, once no launcher has it."""
        return self in {Status.PENDING, Status.RUNNING, Status.INTERRUPTED}

    @property
    def is_sealed(self) -> bool:
        """Whether the run is over for good, and the same command skips it."""
        return self in {Status.COMPLETED, Status.DIVERGED, Status.PRUNED}

    @property
    def has_end(self) -> bool:
        """Whether the run has ended, or was rejected."""
        return self not in {Status.PENDING, Status.RUNNING}

    @property
    def ended_after_launch(self) -> bool:
        """Whether the run was launched, and has ended."""
        return self.has_end and self is not Status.REJECTED


FAULTS = frozenset({Status.FAILED, Status.OOM, Status.TIMEOUT})
"""Statuses of a run that ended by a fault; only `--retry` repeats such a run."""


class StopReason(StrEnum):
    """Why a completed run stopped."""

    BUDGET = "budget"
    TARGET = "target"
    TIMED = "timed"
    """Its steps are timed, and another cut trains the whole budget."""


@dataclass
class Attempt:
    """One start of a run's processes."""

    started_at: float
    """Seconds since the epoch."""
    from_optimizer_step: int
    """Optimizer steps in the checkpoint that it went on from; 0 without one."""
    ended_at: float | None = None
    """Seconds since the epoch; null while it runs. Of one that died with its launcher or its job,
    when it last wrote a row or to its log."""
    status: str | None = None
    """How it ended; null while it runs."""
    reason: str | None = None
    """The cause in words; of a completed attempt, what its metrics lack, if anything."""
    cause: str | None = None
    """`Cause` of its end; null for a completed attempt."""


@dataclass
class RunStatus:
    """Content of `status.json`."""

    status: Status
    stop_reason: StopReason | None = None
    """Why a completed run stopped."""
    reason: str | None = None
    """The cause in words, where a run was rejected or did not complete; of one that completed,
    what the metrics of its program lack."""
    cause: Cause | None = None
    """Cause of its end, where it did not complete."""
    rank: int | None = None
    """The rank that raised the cause first, where one did."""
    phase: str | None = None
    """What that rank was doing, a phase of `record.heartbeat`, where that is known."""
    peak_memory_gib: float | None = None
    """Peak of that rank, where it ran out of memory."""
    peak_memory_method: str | None = None
    """Method of that peak: `allocated` by the allocator of a device, or `resident` on a host."""
    attempts: list[Attempt] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    """Figures of the sealed run; see `record.summary`."""
    seal: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Size in bytes and SHA-256 of each sealed file, by name."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of each sealed table."""
    updated_at: float = field(default_factory=now)
    """Seconds since the epoch."""

    def opened_again(self, why: str) -> RunStatus:
        """Return the status of a run that ended, and that the same command now goes on with."""
        return replace(self, status=Status.INTERRUPTED, reason=f"{why}: {self.reason}")

    def write(self, path: Path, *, replaces: bool = True) -> None:
        """Write the file at `path`, as `write_atomically` does."""
        self.updated_at = now()
        content = {"format_version": FORMAT_VERSION, **asdict(self)}
        write_json(path, content, replaces=replaces)

    @classmethod
    def if_readable(cls, path: Path) -> RunStatus | None:
        """Read a status; None where `read` would raise."""
        try:
            return cls.read(path)
        except RecordError:
            return None

    @classmethod
    def read(cls, path: Path) -> RunStatus:
        """Read a status.

        Raises
        ------
        RecordError
            If the file is missing, damaged, or of another format version.
        """
        content = read_json(path)
        check_version(path, content)
        try:
            content.pop("format_version")
            attempts = [Attempt(**attempt) for attempt in content.pop("attempts")]
            stop_reason = content.pop("stop_reason")
            cause = content.pop("cause", None)
            return cls(
                status=Status(content.pop("status")),
                stop_reason=None if stop_reason is None else StopReason(stop_reason),
                cause=None if cause is None else Cause(cause),
                attempts=attempts,
                **content,
            )
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{path} is damaged: {error}"
            raise DamageError(msg) from None


def check_version(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse a file of another format version."""
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        msg = (
            f"{path} has format version {version}; this batchscape reads version {FORMAT_VERSION}. "
            "Use the batchscape that wrote it, or another sweep_dir"
        )
        raise RecordError(msg)
