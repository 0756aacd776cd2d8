"""The words for how a run ended, and the files that say so.

`status.json` holds the `RunStatus` of a run; each rank leaves an `Outcome`, `outcome-<rank>.json`.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from batchscape.errors import DamageError, RecordError
from batchscape.record.files import read_json, read_record, write_json
from batchscape.record.folder import FORMAT_VERSION, RunFolder
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


OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|CUDA (?:driver )?error: out of memory"
    r"|Triton Error \[CUDA\]: out of memory|RESOURCE_EXHAUSTED: Out of memory"
    r"|Cuda failure (?:\d+ )?'out of memory'|Failed to CUDA calloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|Cannot allocate memory|std::bad_alloc"
)
"""Messages of torch, driver, runtime, Triton, JAX, NCCL, cuBLAS, cuDNN, the system and C++ when
memory is out, in an exception or in the log of a program."""


class Cause(StrEnum):
    """The first cause of the end of a run; the reason says it in words."""

    OUT_OF_MEMORY = "out_of_memory"
    """An allocator refused, or the system's out-of-memory killer struck a process of the run."""
    OTHER_MEMORY = "other_memory"
    """Memory was out that is not the training's alone: that of the host of a device, that of a
    device which other processes share, or memory outside of optimizer steps."""
    DIVERGENCE = "divergence"
    """A loss or a gradient was not finite, or the loss exploded; see `train.divergence`."""
    HANG = "hang"
    """No rank made progress for as long as the rule of `launch.hangs` allows."""
    TIME_LIMIT = "time_limit"
    """The run was not done after `launcher.timeout_s`."""
    EXCEPTION = "exception"
    """A rank or a program raised an error of its own, or left with an exit code that is not 0."""
    SIGNAL = "signal"
    """A signal that batchscape did not send ended a rank: SIGSEGV, SIGBUS, SIGABRT."""
    KILLED = "killed"
    """SIGKILL that batchscape did not send, and no cgroup says that memory was out."""
    LOST_CONNECTION = "lost_connection"
    """A rank lost the others, or never found them, and none of them failed."""
    INFRASTRUCTURE = "infrastructure"
    """The machine: the fork server died, a file system fails, no process can be started."""
    DISK = "disk"
    """The disk of the sweep is full, over a quota, read-only, or fails. The run is interrupted, and
    no more runs begin: the next call of the same command goes on."""
    INTERRUPTED = "interrupted"
    """Ctrl-C, a signal to the launcher or to a rank, or the death of the launcher."""
    DAMAGED_RECORDS = "damaged_records"
    """The records of the ranks cannot be read."""
    CONTRADICTION = "contradiction"
    """The training contradicts the plan: ranks that ended differently, a program that used another
    batch, ended early, or logged what its `metrics` do not describe."""

    @property
    def is_of_the_machine(self) -> bool:
        """Whether the same run may succeed when it is tried again."""
        return self in {
            Cause.OTHER_MEMORY,
            Cause.HANG,
            Cause.SIGNAL,
            Cause.KILLED,
            Cause.LOST_CONNECTION,
            Cause.INFRASTRUCTURE,
        }


@dataclass
class RunEnd:
    """How a run ended, or a rank of it."""

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

    def end(self) -> dict[str, Any]:
        """Return the values of these fields, without those of a class that has more."""
        return {one.name: getattr(self, one.name) for one in fields(RunEnd)}


@dataclass
class Stop(RunEnd):
    """The launcher asked a run to end."""

    at: float = field(default_factory=now)
    """Seconds since the epoch, by `record.instants`."""


@dataclass
class Outcome(RunEnd):
    """How the training ended on one rank, as the rank reports it (`outcome-<rank>.json`)."""

    optimizer_step: int = field(kw_only=True)
    """Optimizer steps done."""
    at: float = field(default_factory=now)
    """Seconds since the epoch, by `record.instants`."""

    def write(self, folder: RunFolder, rank: int) -> None:
        """Write the outcome of a rank.

        Raises
        ------
        DiskError
            If the disk takes no more.
        """
        write_json(folder.outcome(rank), asdict(self))

    @classmethod
    def read(cls, folder: RunFolder, rank: int) -> Outcome | None:
        """Read the outcome of a rank; None where there is none.

        Raises
        ------
        RecordError
            If the file is damaged.
        """
        path = folder.outcome(rank)
        return _parse(cls, path, read_json(path)) if path.exists() else None


@dataclass(frozen=True)
class RankExit:
    """One rank's process has ended."""

    run_id: str
    rank: int
    code: int
    """Exit code; negative: the signal that killed it."""
    at: float
    """When it was noticed, in seconds since the epoch."""
    outside_cause: str | None = None
    """What ended it from outside: a dead fork server or node, or a failed fork."""


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
class RunStatus(RunEnd):
    """Content of `status.json`; of a run without an end, the end of the attempt before."""

    attempts: list[Attempt] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    """Figures of the sealed run; see `record.summary`."""
    seal: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Size in bytes and SHA-256 of each sealed file, by name."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of each sealed table."""
    updated_at: float = field(default_factory=now)
    """Seconds since the epoch."""

    def note_end(self, end: RunEnd, ended_at: float) -> None:
        """Note how the last attempt ended, in seconds since the epoch, without writing it."""
        for name, value in end.end().items():
            setattr(self, name, value)
        attempt = self.attempts[-1]
        attempt.ended_at = ended_at
        attempt.status, attempt.reason = str(end.status), end.reason
        attempt.cause = end.cause and str(end.cause)

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
        return _parse(cls, path, read_record(path))


_End = TypeVar("_End", bound=RunEnd)
_WORDS = {"status": Status, "stop_reason": StopReason, "cause": Cause}


def _parse(kind: type[_End], path: Path, content: dict[str, Any]) -> _End:
    """Make an end of the content of its file."""
    try:
        parts = ("status", "attempts", "seal") if kind is RunStatus else ("status",)
        if missing := [name for name in parts if content.get(name) is None]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        for name, word in _WORDS.items():
            if content.get(name) is not None:
                content[name] = word(content[name])
        if "attempts" in content:
            content["attempts"] = [Attempt(**attempt) for attempt in content["attempts"]]
        return kind(**content)
    except (TypeError, ValueError) as error:
        raise DamageError(f"{path} is damaged: {error}") from None
