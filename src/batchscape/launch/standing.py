"""What is left of a sweep: which runs are to be launched, and how the others stand.

A run is missing while it is pending, was interrupted, or is marked as running by a launcher that
is gone. One that ended by a fault stands as it is, unless repeating its status is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

from batchscape.errors import RecordError
from batchscape.launch.finishing import clear_away, has_ended_well
from batchscape.launch.renewal import begin_anew_if_damaged
from batchscape.launch.result import FAULTS, RunResult
from batchscape.record.causes import Cause
from batchscape.record.claims import CLAIMS
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.locks import exclusively
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status

__all__ = ["Standing", "repeated"]


def repeated(names: Collection[str]) -> frozenset[Status]:
    """Return the statuses that `launcher.retry` names."""
    return FAULTS if "all" in names else frozenset(map(Status, names))


class Standing:
    """How the runs of a sweep stood when a launch began, and how one stands now.

    Runs without a folder, and rejected ones that fit now, are given one that says `pending`.

    Parameters
    ----------
    specs : sequence of RunSpec
    sweep : SweepFolder
    retry : collection of Status
        Faults that are repeated.

    Attributes
    ----------
    specs : sequence of RunSpec
        All of them.
    settled : dict of str to RunResult
        Runs that are not to be launched, by name.
    notes : list of str
        Runs whose folder was damaged and that begin anew.
    missing : list of RunSpec
        The others, in their order.
    """

    def __init__(
        self, specs: Sequence[RunSpec], sweep: SweepFolder, retry: Collection[Status]
    ) -> None:
        self._sweep = sweep
        self._retry = retry
        self.specs = specs
        self._before: dict[str, tuple[Status, int]] = {}
        self.notes: list[str] = []
        self.settled: dict[str, RunResult] = {}
        for spec in specs:
            result = self._settled_before(spec)
            if result is not None:
                self.settled[spec.run_id] = result
        self.missing = [spec for spec in specs if spec.run_id not in self.settled]

    def settled_since(self, spec: RunSpec) -> RunResult | None:
        """Return how a missing run stands if another launcher has ended it by now.

        Raises
        ------
        RecordError
            If its folder is damaged.
        """
        folder = self._sweep.run(spec.run_id)
        status = RunStatus.read(folder.status)
        is_new = (status.status, len(status.attempts)) != self._before.get(spec.run_id)
        ends = status.status in FAULTS or status.status is Status.REJECTED
        if status.status.is_sealed or (is_new and ends):
            return RunResult.of(folder, status, by_another=True)
        return None

    def _settled_before(self, spec: RunSpec) -> RunResult | None:
        folder = self._sweep.run(spec.run_id)
        try:
            note = begin_anew_if_damaged(spec, self._sweep)
            if note is not None:
                self.notes.append(f"{spec.run_id} {note}")
            status = RunStatus.read(folder.status) if folder.status.exists() else None
            if status is None or status.status is Status.REJECTED:
                status = _made_pending(spec, folder, self._sweep)
            self._before[spec.run_id] = status.status, len(status.attempts)
            if not status.status.is_sealed and not self._is_fault_that_stands(spec, folder, status):
                return None
            if status.status.is_sealed:
                _clear_away(folder)
            return RunResult.of(folder, status, skipped=True)
        except RecordError as error:
            reason = f"{error}; delete {folder.path} to run it again"
        except OSError as error:
            reason = str(error)
        return RunResult(spec.run_id, Status.FAILED, reason, folder.log)

    def _is_fault_that_stands(self, spec: RunSpec, folder: RunFolder, status: RunStatus) -> bool:
        if status.status not in FAULTS or status.status in self._retry:
            return False
        # The disk has space again, or says anew that it has none; the damage has been set aside.
        if status.cause in {Cause.DISK, Cause.DAMAGED_RECORDS}:
            return False
        # Its ranks did all that they had to: only its end could not be written.
        return not has_ended_well(spec, folder)


def _clear_away(folder: RunFolder) -> None:
    """Do what a launcher that was killed right after the seal has left, its lock among it."""
    with suppress(OSError):
        claim = CLAIMS.claim(folder) if folder.lock.exists() else None
        if claim is not None:
            clear_away(folder)
            claim.release(is_over=True)


def _made_pending(spec: RunSpec, folder: RunFolder, sweep: SweepFolder) -> RunStatus:
    """Give a run its folder, unless another launcher has done so meanwhile, and begun."""
    with exclusively(sweep.writing):
        if folder.status.exists():
            status = RunStatus.read(folder.status)
            if status.status is not Status.REJECTED:
                return status
        status = RunStatus(Status.PENDING)
        spec.write(folder.config)
        status.write(folder.status)
        return status
