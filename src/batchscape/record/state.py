"""The state of a run, the next step of the same command, and checks of sealed files.

Launchers, jobs and `batchscape status` read states only here. `status.json` says how a run ended;
its state depends as well on its holder and on the outcomes of its ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchscape.errors import DamageError, RecordError
from batchscape.record.causes import Cause
from batchscape.record.claims import CLAIMS
from batchscape.record.files import last_row, read_json
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.outcome import Outcome, decide
from batchscape.record.status import FAULTS, RunStatus, Status, check_version

if TYPE_CHECKING:
    from batchscape.record.spec import RunSpec


UNREADABLE = "unreadable"
"""Shown in place of a status that is damaged, of another format version, or cannot be read."""

_LAUNCHER_GONE = "the launcher is gone; the same command goes on"


class Next(StrEnum):
    """Next step of the same command with a run."""

    SKIP = "skip"
    """It is over."""
    WAIT = "wait"
    """It runs now, and another launcher leaves it alone."""
    SEAL = "seal"
    """It was trained to its end, and only its seal could not be written: seals it from its rows."""
    BEGIN = "begin"
    """Starts it from its first step."""
    GO_ON = "go_on"
    """Goes on from its newest checkpoint, or starts a program that goes on by itself."""
    LEAVE = "leave"
    """Leaves it as it is; a fault is repeated where `--retry` names its status."""
    REJECT = "reject"
    """Lists it."""

    @property
    def is_work(self) -> bool:
        """Whether the same command would do anything."""
        return self in {Next.SEAL, Next.BEGIN, Next.GO_ON}


@dataclass(frozen=True)
class RunState:
    """State of a run."""

    folder: RunFolder
    record: RunStatus = field(default_factory=lambda: RunStatus(Status.PENDING))
    """Content of its `status.json`; without one the run is pending."""
    holder: str | None = None
    """Launcher that has it; None for a sealed run."""
    processes: int = 1
    """Number of processes that leave an outcome each."""
    is_resumable: bool = False
    """Whether it is a program that goes on when it is started again."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of its `config.json`, where it was read."""

    def next_step(self, retry: Collection[Status] = ()) -> Next:
        """Return the next step of the same command, which repeats the faults in `retry`."""
        status = self.record.status
        if status.is_sealed:
            return Next.SKIP
        if self.holder is not None:
            return Next.WAIT
        if status is Status.REJECTED:
            return Next.REJECT
        if self.record.attempts and final_outcomes(self.folder, self.processes) is not None:
            return Next.SEAL
        if status in FAULTS and status not in retry:
            return Next.LEAVE
        return Next.GO_ON if self.goes_on else Next.BEGIN

    @property
    def goes_on(self) -> bool:
        """Whether another attempt goes on; else the ranks drop the rows and begin again."""
        by_itself = self.is_resumable and bool(self.record.attempts)
        return by_itself or self.folder.checkpoint_step is not None

    @property
    def is_between_attempts(self) -> bool:
        """Whether an attempt has ended, and its launcher keeps the run for the next one."""
        return self.record.status is Status.INTERRUPTED and self.holder is not None

    @property
    def is_lost(self) -> bool:
        """Whether its status is `running`, and no launcher has it."""
        return self.record.status is Status.RUNNING and self.holder is None

    @property
    def lost_at(self) -> float:
        """Time of the end of a lost run, in seconds since the epoch: when it last wrote."""
        # An attempt begins after those before it, even where its launcher's clock is behind.
        return max(self.record.attempts[-1].started_at, self.folder.written_at)

    @property
    def status(self) -> Status:
        """Its status as it is shown, which depends on its holder as well."""
        if self.is_between_attempts:
            return Status.RUNNING
        return Status.INTERRUPTED if self.is_lost else self.record.status

    @property
    def cause(self) -> Cause | None:
        """Cause of its end, where it has ended and did not complete."""
        if self.is_between_attempts:
            return None
        return Cause.INTERRUPTED if self.is_lost else self.record.cause

    @property
    def reason(self) -> str | None:
        """The cause in words."""
        if self.is_between_attempts:
            return None
        return _LAUNCHER_GONE if self.is_lost else self.record.reason


def read_state(
    folder: RunFolder, spec: RunSpec | None = None, *, is_ours: bool = False
) -> RunState:
    """Read the state of a run.

    Parameters
    ----------
    folder : RunFolder
    spec : RunSpec, optional
        Specification of the run; by default it is read from the folder.
    is_ours : bool
        Whether the caller has claimed the run, or is about to; then the holder is not read.

    Raises
    ------
    RecordError
        If its folder is damaged, or of another format version.
    OSError
        If it cannot be read.
    """
    config: Mapping[str, Any] = {}
    # A launcher that has begun a run has written its status; one that made its folder, perhaps not.
    has_begun = folder.status.exists() or folder.launch.exists()
    if spec is None and (has_begun or folder.config.exists()):
        config = read_json(folder.config)
        check_version(folder.config, config)
    record = RunStatus.read(folder.status) if has_begun else RunStatus(Status.PENDING)
    # The holder is read after the status: a run that ends between is not taken for a lost one.
    holder = None if is_ours or record.status.is_sealed else CLAIMS.holder(folder)
    if record.status is Status.RUNNING and holder is None and not is_ours:
        record = RunStatus.read(folder.status)
    if spec is not None:
        processes, is_resumable = spec.processes, spec.is_resumable_program
    else:
        engine = (config.get("config") or {}).get("engine") or {}
        is_program = engine.get("name") == "command"
        ranks = (config.get("geometry") or {}).get("data_parallel_size", 1)
        processes = 1 if is_program else ranks
        is_resumable = is_program and bool(engine.get("resumable"))
    return RunState(folder, record, holder, processes, is_resumable, config)


def final_outcomes(folder: RunFolder, processes: int) -> Mapping[int, Outcome] | None:
    """Return the outcomes of a run that was trained to its end; None where it was not.

    Parameters
    ----------
    folder : RunFolder
    processes : int
        Number of processes that leave an outcome each.

    Returns
    -------
    mapping of int to Outcome, or None
        None unless the ranks of the latest attempt agree on a final end, and the rows of all steps
        exist.
    """
    outcomes: dict[int, Outcome] = {}
    try:
        for rank in range(processes):
            outcome = Outcome.read(folder, rank)
            if outcome is None:
                return None
            outcomes[rank] = outcome
        done = last_row(folder.lines("steps")).get("optimizer_step", 0)
    except RecordError:
        return None
    if any(outcome.optimizer_step != done for outcome in outcomes.values()):
        return None
    return outcomes if decide(processes, outcomes, {}).status.is_sealed else None


def is_rejected_by_plan(status: str, cause: str | None) -> bool:
    """Return whether a plan rejected a run; a launcher does where a smaller run was out of memory.

    What an earlier plan rejected, on a smaller machine, starts anew where a plan has it again; what
    a launcher rejected it will mostly reject again.
    """
    return status == Status.REJECTED and cause != Cause.OUT_OF_MEMORY


def unsealed(specs: Iterable[RunSpec], sweep: SweepFolder) -> list[RunSpec]:
    """Return the runs without sealed tables; one whose launcher died while sealing has them."""
    sealed = {f.path.name for f in sweep.run_folders() if f.parquet("steps").exists()}
    return [spec for spec in specs if spec.run_id not in sealed]


def is_tried_again(status: RunStatus, retries_left: int) -> bool:
    """Return whether the launch that saw a run end tries it again, from its newest checkpoint.

    It does where the machine may have ended the run: a hang, a rank that was killed, crashed or
    lost its connection, a fork server that died. It does not where the same run would end likewise:
    an exception, memory that is out, divergence, a time limit, damaged records.
    """
    if status.status is not Status.FAILED or status.cause is None:
        return False
    return retries_left > 0 and status.cause.is_of_the_machine


def read_sealed(path: Path, sealed: Mapping[str, Any]) -> bytes:
    """Read a sealed file, and check its hash.

    Parameters
    ----------
    path : Path
    sealed : mapping
        Its entry in `RunStatus.seal`.

    Raises
    ------
    DamageError
        If it is missing or differs.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = b""
    if hashlib.sha256(content).hexdigest() != sealed["sha256"]:
        msg = f"{path} is missing or differs from what was sealed"
        raise DamageError(msg)
    return content


def verify_seal(folder: RunFolder, status: RunStatus) -> None:
    """Check the hash of every sealed file.

    Raises
    ------
    RecordError
        If one is missing or differs.
    """
    for name, sealed in status.seal.items():
        read_sealed(folder.path / name, sealed)
