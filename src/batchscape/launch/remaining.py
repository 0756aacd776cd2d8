"""What is left of a sweep: which runs are to be launched, and how the others stand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from batchscape.errors import RecordError
from batchscape.launch.ending import clear_away, seal_from_rows
from batchscape.launch.result import RunResult
from batchscape.record.claims import CLAIMS
from batchscape.record.disk import read_each
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.locks import hold
from batchscape.record.spec import RunSpec
from batchscape.record.state import Next, read_state, verify_seal
from batchscape.record.status import FAULTS, RunStatus, Status

__all__ = ["RemainingRuns", "repeated"]


def repeated(names: Collection[str]) -> frozenset[Status]:
    """Return the statuses that `launcher.retry` names."""
    return FAULTS if "all" in names else frozenset(map(Status, names))


class RemainingRuns:
    """The runs of a sweep that a launch has to do, and how the others stand.

    Runs without a folder, and rejected ones that fit now, are given one that says `pending`.

    Parameters
    ----------
    specs : sequence of RunSpec
    sweep : SweepFolder
    retry : collection of Status
        Faults that are repeated.

    Attributes
    ----------
    specs : list of RunSpec
        All of them.
    settled : dict of str to RunResult
        Runs that are not to be launched, by name.
    missing : list of RunSpec
        The others, in their order.
    """

    def __init__(
        self, specs: Sequence[RunSpec], sweep: SweepFolder, retry: Collection[Status]
    ) -> None:
        self._sweep = sweep
        self._retry = retry
        self.specs: list[RunSpec] = []
        self._attempts: dict[str, int] = {}
        self.settled: dict[str, RunResult] = {}
        self.missing = self.add(specs)

    def add(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """Take on more runs; return those of them that are to be launched."""
        self.specs += specs
        stood = read_each(self._settled_before, specs, self._sweep.path)
        for spec, result in zip(specs, stood, strict=True):
            if result is not None:
                self.settled[spec.run_id] = result
        return [spec for spec in specs if spec.run_id not in self.settled]

    def results(self, done: Mapping[str, RunResult]) -> tuple[RunResult, ...]:
        """Return how all runs stand, given those that this launch has done."""
        ended = {**self.settled, **done}
        return tuple(ended.get(spec.run_id) or self._now(spec) for spec in self.specs)

    def _now(self, spec: RunSpec) -> RunResult:
        folder = self._sweep.run(spec.run_id)
        return RunResult.of(folder, RunStatus.read(folder.status))

    def _settled_before(self, spec: RunSpec) -> RunResult | None:
        folder = self._sweep.run(spec.run_id)
        try:
            state = read_state(folder, spec, is_ours=True)
            if not folder.status.exists() or state.record.status is Status.REJECTED:
                state = replace(state, record=_made_pending(spec, folder, self._sweep))
            self._attempts[spec.run_id] = len(state.record.attempts)
            what = state.next_step(self._retry)
            if what is Next.SKIP:
                verify_seal(folder, state.record)
                _clear_away(folder)
            if what in {Next.SKIP, Next.LEAVE}:
                return RunResult.of(folder, state.record, skipped=True)
        except RecordError as error:
            reason = f"{error}; delete {folder.path} to run it again"
        except OSError as error:
            reason = str(error)
        else:
            return None
        return RunResult(spec.run_id, Status.FAILED, reason, folder.log)

    def settled_now(self, spec: RunSpec) -> RunResult | None:
        """Return how a missing run stands that this launcher has locked, if it is over by now.

        Another launcher may have ended it, or it lacks nothing but its seal, which it is given.

        Raises
        ------
        RecordError
            If its folder is damaged.
        OSError
            If its seal cannot be written.
        """
        folder = self._sweep.run(spec.run_id)
        state = read_state(folder, spec, is_ours=True)
        # A fault is repeated once a launch: not what ended so since, by another launcher.
        is_new = len(state.record.attempts) != self._attempts[spec.run_id]
        what = state.next_step(() if is_new else self._retry)
        if what is Next.SEAL and seal_from_rows(spec, folder, state.record):
            return RunResult.of(folder, state.record)
        if what is Next.SKIP:
            clear_away(folder)  # its launcher may have died right after the seal
        if what in {Next.SKIP, Next.LEAVE, Next.REJECT}:
            return RunResult.of(folder, state.record, by_another=True)
        return None


def _clear_away(folder: RunFolder) -> None:
    """Do what a launcher that was killed right after the seal has left, its lock among it."""
    with suppress(OSError):
        claim = CLAIMS.claim(folder) if folder.lock.exists() else None
        if claim is not None:
            clear_away(folder)
            claim.release(is_over=True)


def _made_pending(spec: RunSpec, folder: RunFolder, sweep: SweepFolder) -> RunStatus:
    """Give a run its folder, unless another launcher has done so meanwhile, and begun."""
    with hold(sweep.writing):
        status = RunStatus.read(folder.status) if folder.status.exists() else None
        if status is not None and status.status is not Status.REJECTED:
            return status
        pending = RunStatus(Status.PENDING)
        spec.write(folder.config)
        try:
            pending.write(folder.status, replaces=status is not None)
        except FileExistsError:  # there may be no locks
            return RunStatus.read(folder.status)
        return pending
