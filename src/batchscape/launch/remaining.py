"""What is left of a sweep: which runs are to be launched, and how the others stand.

One that another launcher has claimed is left for now and looked at again: once nobody holds it, it
has ended, or its launcher has died, and it is ours.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from batchscape.errors import RecordError
from batchscape.launch.ending import clear_away, seal_from_rows
from batchscape.launch.result import RunResult
from batchscape.record.claims import CLAIMS, RunClaim
from batchscape.record.disk import read_each
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.locks import hold
from batchscape.record.spec import RunSpec
from batchscape.record.state import Next, read_state, verify_seal
from batchscape.record.status import FAULTS, RunStatus, Status
from batchscape.text import count_text, list_text

_LOOK_S, _LONGEST_S = 1.0, 0.05
"""Time between looks at the runs that others have, and the time that a look takes at most; the next
one goes on where it ended. A hundred launchers ask one file system for a thousand runs."""


class _Elsewhere(NamedTuple):
    """A run that this launcher would begin."""

    spec: RunSpec
    holder: str | None
    """Who had it when it was last looked at; None: somebody who is gone."""


class ClaimedRuns:
    """Claims of one launcher.

    Parameters
    ----------
    sweep : SweepFolder
    remaining : RemainingRuns
        Tells whether one is over by now.
    waits : bool
        Whether runs that others are at work on are waited for.
    """

    def __init__(self, sweep: SweepFolder, remaining: RemainingRuns, *, waits: bool = True) -> None:
        self._waits = waits
        self._sweep = sweep
        self._remaining = remaining
        self._claims: dict[str, RunClaim] = {}
        self._elsewhere: dict[str, _Elsewhere] = {}
        self._look_at = 0.0

    @property
    def has_elsewhere(self) -> bool:
        """Whether others have runs that this launcher would begin, and waits for.

        Those that a launcher has left are waited for in any case: nobody else may take them.
        """
        if self._waits or any(run.holder is None for run in self._elsewhere.values()):
            return bool(self._elsewhere)
        # Before this launcher ends: as they stand now, and not when they were last looked at.
        return any(self._noted(run.spec).holder is None for run in list(self._elsewhere.values()))

    @property
    def elsewhere(self) -> Collection[str]:
        """Runs that others have and that this launcher would begin."""
        return self._elsewhere.keys()

    def take(self, spec: RunSpec) -> RunClaim | RunResult | None:
        """Claim a run that is to be begun.

        Parameters
        ----------
        spec : RunSpec

        Returns
        -------
        RunClaim or RunResult or None
            The claim, which the ranks are to inherit. Or how the run stands, if it is over by now.
            Or None while another launcher has it; `due` returns it later.

        Raises
        ------
        RecordError
            If the run folder is damaged.
        OSError
            If its folder cannot be written to.
        """
        # One that is tried again has kept its claim.
        claim = self._claims.get(spec.run_id) or CLAIMS.claim(self._sweep.run(spec.run_id))
        if claim is None:
            self._noted(spec)
            return None
        self._claims[spec.run_id] = claim
        result = self._remaining.settled_now(spec)
        if result is None:
            return claim
        self.release(spec.run_id, result.status)
        return result

    def is_elsewhere(self, spec: RunSpec) -> bool:
        """Whether another launcher has a run, which is noted; `due` returns it later."""
        if spec.run_id in self._claims:
            return False
        has_holder = self._noted(spec).holder is not None
        if not has_holder:
            del self._elsewhere[spec.run_id]
        return has_holder

    def due(self) -> list[RunSpec]:
        """Return runs that others had and have no more; each is looked at once a second at most."""
        began = time.monotonic()
        if began < self._look_at:
            return []
        left = []
        for run in list(self._elsewhere.values()):
            if not self.is_elsewhere(run.spec):
                left.append(run.spec)
            if time.monotonic() - began > _LONGEST_S:
                break
        self._look_at = time.monotonic() + _LOOK_S
        return left

    def _noted(self, spec: RunSpec) -> _Elsewhere:
        """Note who has a run, as the last one that was looked at."""
        self._elsewhere.pop(spec.run_id, None)
        found = _Elsewhere(spec, CLAIMS.holder(self._sweep.run(spec.run_id)))
        self._elsewhere[spec.run_id] = found
        return found

    def renew(self, ended: Collection[str]) -> list[str]:
        """Keep what this launcher has claimed; return the runs that others have taken over.

        Parameters
        ----------
        ended : collection of str
            Runs whose end may be written next, which are looked at however short ago that was.
        """
        lost = [
            name for name, claim in self._claims.items() if not claim.renew(at_once=name in ended)
        ]
        for name in lost:
            self._claims.pop(name).release()
        return lost

    def release(self, run_id: str, status: Status) -> None:
        """Give a run up that this launcher has ended; nothing where it has not claimed it."""
        claim = self._claims.pop(run_id, None)
        if claim is not None:
            claim.release(is_over=status.is_sealed)

    def release_all(self) -> None:
        """Give everything up; runs that have no end are for others to go on with."""
        for claim in self._claims.values():
            claim.release()
        self._claims.clear()

    def describe_elsewhere(self) -> str:
        """Say who has the runs that are waited for; nothing where nobody has any more."""
        held = {name: run.holder for name, run in self._elsewhere.items() if run.holder is not None}
        if not held:
            return ""
        holders = ", ".join(sorted(set(held.values())))
        return (
            f"Waiting for {count_text(len(held), 'run')} of another launcher ({holders}, or what "
            f"it left): {list_text(held, 'and', 3)}"
        )


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
        folders = [self._sweep.run(spec.run_id) for spec in self.specs]
        return tuple(
            ended.get(folder.path.name) or RunResult.of(folder, RunStatus.read(folder.status))
            for folder in folders
        )

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
