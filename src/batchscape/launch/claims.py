"""The runs of a sweep that this launcher has begun, and those that another one has.

One that another launcher has claimed is left for now and looked at again: once nobody holds it, it
has ended, or its launcher has died, and it is ours.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from batchscape.launch.result import RunResult
from batchscape.launch.standing import Standing
from batchscape.record.claims import CLAIMS, RunClaim
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import Status

__all__ = ["ClaimedRuns"]

_LOOK_S, _LOOK_SHARE = 1.0, 0.05
"""Least time between two looks at the runs that others have, and the share of the time that
looking may take: a hundred launchers ask one file system for a thousand runs."""


class ClaimedRuns:
    """Claims of one launcher.

    Parameters
    ----------
    sweep : SweepFolder
    standing : Standing
        How the runs stood before.
    waits : bool
        Whether runs that others are at work on are waited for.
    """

    def __init__(self, sweep: SweepFolder, standing: Standing, *, waits: bool = True) -> None:
        self._waits = waits
        self._sweep = sweep
        self._standing = standing
        self._claims: dict[str, RunClaim] = {}
        self._elsewhere: dict[str, RunSpec] = {}
        self._look_at = 0.0

    @property
    def has_elsewhere(self) -> bool:
        """Whether others have runs that this launcher would begin, and waits for.

        Those that a launcher has left are waited for in any case: nobody else may take them.
        """
        left = (CLAIMS.holder(self._sweep.run(name)) is None for name in self._elsewhere)
        return bool(self._elsewhere) and (self._waits or any(left))

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
            self._elsewhere[spec.run_id] = spec
            return None
        self._claims[spec.run_id] = claim
        result = self._standing.settled_now(spec)
        if result is None:
            return claim
        self.release(spec.run_id, result.status)
        return result

    def is_elsewhere(self, spec: RunSpec) -> bool:
        """Whether another launcher has a run, which is noted; `due` returns it later."""
        if spec.run_id in self._claims or CLAIMS.holder(self._sweep.run(spec.run_id)) is None:
            return False
        self._elsewhere[spec.run_id] = spec
        return True

    def due(self) -> list[RunSpec]:
        """Return the runs that others had and have no more; looked for once a second at most."""
        began = time.monotonic()
        if began < self._look_at:
            return []
        found = list(self._elsewhere.values())
        self._elsewhere.clear()
        left = [spec for spec in found if not self.is_elsewhere(spec)]
        ended = time.monotonic()
        self._look_at = ended + max(_LOOK_S, (ended - began) / _LOOK_SHARE)
        return left

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
        found = {name: CLAIMS.holder(self._sweep.run(name)) for name in self._elsewhere}
        held = {name: holder for name, holder in found.items() if holder is not None}
        if not held:
            return ""
        count = "1 run" if len(held) == 1 else f"{len(held)} runs"
        holders = ", ".join(sorted(set(held.values())))
        shown = ", ".join(list(held)[:3]) + (", ..." if len(held) > 3 else "")
        return f"Waiting for {count} of another launcher ({holders}, or what it left): {shown}"
