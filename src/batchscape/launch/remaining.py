"""Which runs of a sweep are to be launched, how the others stand, and the claims on runs.

A run that another launcher has claimed is looked at again later: once nobody holds it, it has
ended, or its launcher has died, and this one may claim it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from batchscape.errors import RecordError
from batchscape.launch.attempt import write_end
from batchscape.launch.result import RunResult
from batchscape.record.claims import CLAIMS, RunClaim
from batchscape.record.disk import read_each
from batchscape.record.folder import RunFolder, SweepFolder
from batchscape.record.locks import hold
from batchscape.record.spec import RunSpec
from batchscape.record.state import Next, final_end, read_state
from batchscape.record.status import FAULTS, RunStatus, Status
from batchscape.record.tables import clear_away, verify_seal
from batchscape.text import count_text, list_text

_LOOK_S = 1.0
"""Time between looks at the runs of other launchers."""
_LONGEST_LOOK_S = 0.05
"""Longest time of a look; the next look goes on where it ended. A hundred launchers may ask one
file system for a thousand runs."""


def statuses_to_retry(names: Collection[str]) -> frozenset[Status]:
    """Return the statuses that `launcher.retry` names."""
    return FAULTS if "all" in names else frozenset(map(Status, names))


class RemainingRuns:
    """The runs of a sweep that are to be launched, the claims on them, and how the others stand.

    Runs without a folder, and rejected ones that fit now, get a folder with status `pending`.

    Parameters
    ----------
    specs : sequence of RunSpec
    sweep : SweepFolder
    retry : collection of Status
        Statuses of faults that are repeated.
    waits : bool
        Whether this launcher waits for runs that others are at work on.

    Attributes
    ----------
    specs : list of RunSpec
        All runs.
    settled : dict of str to RunResult
        Runs that are not to be launched, by name.
    statuses : dict of str to RunStatus
        Content of `status.json` of all runs that can be read, as it was found, by name.
    missing : list of RunSpec
        The others, in their order.
    """

    def __init__(
        self,
        specs: Sequence[RunSpec],
        sweep: SweepFolder,
        retry: Collection[Status],
        *,
        waits: bool = True,
    ) -> None:
        self._sweep, self._retry, self._waits = sweep, retry, waits
        self._claims: dict[str, RunClaim] = {}
        self._runs_of_others: dict[str, tuple[RunSpec, str | None]] = {}
        """Runs that this launcher would begin and that another one has, with who had them at the
        last look; None where that launcher is gone."""
        self._next_look_s = 0.0
        self.specs: list[RunSpec] = []
        self.statuses: dict[str, RunStatus] = {}
        self.settled: dict[str, RunResult] = {}
        self.missing = self.add(specs)

    def add(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """Add runs; return those that are to be launched."""
        self.specs += specs
        results = read_each(self._settle_before, specs, self._sweep.path)
        self.settled |= {result.run_id: result for result in results if result is not None}
        return [spec for spec in specs if spec.run_id not in self.settled]

    def results(self, results_of_launch: Mapping[str, RunResult]) -> tuple[RunResult, ...]:
        """Return the results of all runs, given those of this launch."""
        result_of = {**self.settled, **results_of_launch}
        folders = [self._sweep.run(spec.run_id) for spec in self.specs]
        return tuple(
            result_of.get(folder.path.name) or RunResult.of(folder, RunStatus.read(folder.status))
            for folder in folders
        )

    def _settle_before(self, spec: RunSpec) -> RunResult | None:
        folder = self._sweep.run(spec.run_id)
        try:
            state = read_state(folder, spec, is_ours=True)
            if not folder.status.exists() or state.record.status is Status.REJECTED:
                state = replace(state, record=_make_pending(spec, folder, self._sweep))
            self.statuses[spec.run_id] = state.record
            next_step = state.next_step(self._retry)
            if next_step is Next.SKIP:
                verify_seal(folder, state.record)
                # A launcher that was killed right after the seal has left its lock and its rows.
                with suppress(OSError):
                    if folder.lock.exists() and (claim := CLAIMS.claim(folder)) is not None:
                        clear_away(folder)
                        claim.release(is_over=True)
            if next_step in {Next.SKIP, Next.LEAVE}:
                return RunResult.of(folder, state.record, skipped=True)
        except (RecordError, OSError) as error:
            is_damaged = isinstance(error, RecordError)
            advice = f"; delete {folder.path} to run it again" if is_damaged else ""
            return RunResult(folder, Status.FAILED, f"{error}{advice}")
        return None

    def settle_now(self, spec: RunSpec) -> RunResult | None:
        """Return the result of a missing run that this launcher has claimed, if it is over by now.

        Another launcher may have ended it, or it lacks only its seal, which is written here.

        Raises
        ------
        RecordError
            If its folder is damaged.
        OSError
            If its seal cannot be written.
        """
        folder = self._sweep.run(spec.run_id)
        state = read_state(folder, spec, is_ours=True)
        # A fault is repeated once a launch, and not where another launcher has repeated it.
        is_new = len(state.record.attempts) != len(self.statuses[spec.run_id].attempts)
        next_step = state.next_step(() if is_new else self._retry)
        if next_step is Next.SEAL and (end := final_end(folder, spec.processes)) is not None:
            with suppress(RecordError):  # where its rows are damaged, it is trained again
                write_end(spec, folder, state.record, *end)
                return RunResult.of(folder, state.record)
        if next_step is Next.SKIP:
            clear_away(folder)  # its launcher may have died right after the seal
        if next_step in {Next.SKIP, Next.LEAVE, Next.REJECT}:
            return RunResult.of(folder, state.record, by_another=True)
        return None

    @property
    def waits_for_others(self) -> bool:
        """Whether this launcher waits for runs that others have.

        It waits in any case for a run whose launcher is gone: nobody else may take it.
        """
        runs = list(self._runs_of_others.values())
        if self._waits or any(holder is None for _, holder in runs):
            return bool(runs)
        # This launcher is about to end: the last look may be outdated.
        return any(self._look_up_holder(spec) is None for spec, _ in runs)

    def take(self, spec: RunSpec) -> RunClaim | RunResult | None:
        """Claim a run that is to begin.

        Parameters
        ----------
        spec : RunSpec

        Returns
        -------
        RunClaim or RunResult or None
            The claim, which the ranks inherit; the result of the run, if it is over by now; None
            while another launcher has it, and then `due` returns it later.

        Raises
        ------
        RecordError
            If the run folder is damaged.
        OSError
            If its folder cannot be written to.
        """
        # A run that is tried again has kept its claim.
        claim = self._claims.get(spec.run_id) or CLAIMS.claim(self._sweep.run(spec.run_id))
        if claim is None:
            self._look_up_holder(spec)
            return None
        self._claims[spec.run_id] = claim
        result = self.settle_now(spec)
        if result is not None:
            self.release(spec.run_id, is_over=result.status.is_sealed)
        return result or claim

    def is_claimed_by_other(self, spec: RunSpec) -> bool:
        """Whether another launcher has a run; then `due` returns it later."""
        if spec.run_id in self._claims:
            return False
        has_holder = self._look_up_holder(spec) is not None
        if not has_holder:
            del self._runs_of_others[spec.run_id]
        return has_holder

    def due(self) -> Iterator[RunSpec]:
        """Yield runs that others no longer have; each is looked at once a second at most."""
        began_at = time.monotonic()
        if began_at < self._next_look_s:
            return
        for spec, _ in list(self._runs_of_others.values()):
            if not self.is_claimed_by_other(spec):
                yield spec
            if time.monotonic() - began_at > _LONGEST_LOOK_S:
                break
        self._next_look_s = time.monotonic() + _LOOK_S

    def _look_up_holder(self, spec: RunSpec) -> str | None:
        """Return who has a run, and note it behind the others."""
        self._runs_of_others.pop(spec.run_id, None)
        holder = CLAIMS.holder(self._sweep.run(spec.run_id))
        self._runs_of_others[spec.run_id] = spec, holder
        return holder

    def renew(self, ended_run_ids: Collection[str]) -> list[str]:
        """Renew the claims of this launcher; return the runs that others have taken over.

        Parameters
        ----------
        ended_run_ids : collection of str
            Runs whose end may be written next; their claims are renewed at once.
        """
        taken_over_ids = [
            name
            for name, claim in self._claims.items()
            if not claim.renew(at_once=name in ended_run_ids)
        ]
        for name in taken_over_ids:
            self.release(name)
        return taken_over_ids

    def release(self, run_id: str, *, is_over: bool = False) -> None:
        """Release the claim on a run, if there is one; `is_over`: no launcher claims it again."""
        if (claim := self._claims.pop(run_id, None)) is not None:
            claim.release(is_over=is_over)

    def release_all(self) -> None:
        """Release all claims; others may go on with runs that have not ended."""
        for run_id in list(self._claims):
            self.release(run_id)

    def describe_waiting(self) -> str:
        """Say who has the runs that this launcher waits for; empty where nobody has them."""
        holder_of = {
            name: holder for name, (_, holder) in self._runs_of_others.items() if holder is not None
        }
        if not holder_of:
            return ""
        holders = ", ".join(sorted(set(holder_of.values())))
        return (
            f"Waiting for {count_text(len(holder_of), 'run')} of another launcher ({holders}, or "
            f"what it left): {list_text(holder_of, 'and', 3)}"
        )


def _make_pending(spec: RunSpec, folder: RunFolder, sweep: SweepFolder) -> RunStatus:
    """Make the folder of a run, unless another launcher has done so meanwhile."""
    with hold(sweep.writing_lock):
        status = RunStatus.read(folder.status) if folder.status.exists() else None
        if status is not None and status.status is not Status.REJECTED:
            return status
        pending = RunStatus(Status.PENDING)
        spec.write(folder.config)
        try:
            pending.write(folder.status, replaces=status is not None)
        except FileExistsError:  # the file system may have no locks
            return RunStatus.read(folder.status)
        return pending
