"""The runs of a sweep that this launcher has begun, and those that another one has.

A run is claimed by its lock, from its start to its end. One that another launcher has claimed is
left for now and looked at again: it has ended by then, or its launcher has died, and it is ours.
"""

from __future__ import annotations

import time

import psutil

from batchscape.launch.lock import run_lock
from batchscape.launch.result import RunResult
from batchscape.launch.standing import Standing
from batchscape.record.folder import SweepFolder
from batchscape.record.locks import Lock, holder
from batchscape.record.spec import RunSpec
from batchscape.record.status import Status

__all__ = ["Claims"]

_LOOK_S = 1.0
"""Time between looks at the runs that others have."""


class Claims:
    """Locks of runs.

    Parameters
    ----------
    sweep : SweepFolder
    standing : Standing
        How the runs stood before.
    """

    def __init__(self, sweep: SweepFolder, standing: Standing) -> None:
        self._sweep = sweep
        self._standing = standing
        self._locks: dict[str, Lock] = {}
        self._elsewhere: dict[str, RunSpec] = {}
        self._look_at = 0.0

    @property
    def has_elsewhere(self) -> bool:
        """Whether others have runs that this launcher would begin."""
        return bool(self._elsewhere)

    def take(self, spec: RunSpec) -> Lock | RunResult | None:
        """Claim a run that is to be begun.

        Parameters
        ----------
        spec : RunSpec

        Returns
        -------
        Lock or RunResult or None
            The lock, which the ranks are to inherit. Or how the run stands, if it is over by now.
            Or None while another launcher has it; `due` returns it later.

        Raises
        ------
        RecordError
            If the run folder is damaged.
        LaunchError
            If its file system has no locks.
        OSError
            If it cannot be written to.
        """
        # One that is tried again has kept its lock.
        lock = self._locks.get(spec.run_id)
        if lock is not None:
            return lock
        lock = run_lock(self._sweep.run(spec.run_id))
        if lock is None:
            self._elsewhere[spec.run_id] = spec
            return None
        self._locks[spec.run_id] = lock
        result = self._standing.settled_now(spec)
        if result is None:
            return lock
        self.release(spec.run_id, result.status)
        return result

    def due(self) -> list[RunSpec]:
        """Return the runs that others had, when it is time to look at them again."""
        now = time.monotonic()
        if not self._elsewhere or now < self._look_at:
            return []
        self._look_at = now + _LOOK_S
        found = list(self._elsewhere.values())
        self._elsewhere.clear()
        return found

    def release(self, run_id: str, status: Status) -> None:
        """Give a run up that this launcher has ended; nothing where it has not claimed it."""
        lock = self._locks.pop(run_id, None)
        if lock is not None:
            lock.release(remove=status.is_sealed)

    def release_all(self) -> None:
        """Give everything up; runs that have no end are for others to go on with."""
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def describe_elsewhere(self) -> str:
        """Say who has the runs that are waited for; nothing where nobody has any more."""
        signed = {name: holder(self._sweep.run(name).lock) for name in self._elsewhere}
        holders = {name: pid for name, pid in signed.items() if pid is not None}
        if not holders:
            return ""
        pids = sorted(set(holders.values()))
        alive = [pid for pid in pids if psutil.pid_exists(pid)]
        shown = ", ".join(list(holders)[:3]) + (", ..." if len(holders) > 3 else "")
        count = "1 run" if len(holders) == 1 else f"{len(holders)} runs"
        listed = ", ".join(map(str, alive or pids))
        who = f"another launcher (process {listed})"
        if not alive:
            who = f"processes that a launcher (process {listed}, gone) has left"
        return f"Waiting for {count} of {who}: {shown}"
