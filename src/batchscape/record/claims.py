"""Who runs which run of a sweep: one launcher at a time, from the start of a run to its end.

`RunClaims` and `RunClaim` are all that launchers and readers know of it. `CLAIMS` is what they use:
locks on files.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from batchscape.record.folder import RunFolder
from batchscape.record.locks import Lock, is_held, take

__all__ = ["CLAIMS", "RunClaim", "RunClaims"]


class RunClaim(Protocol):
    """A run that this launcher holds."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that the run's processes inherit: the claim lasts as long as any of them."""

    def renew(self) -> None:
        """Show that its holder lives; to be called every few seconds.

        A claim that nobody renews any more is there to be taken over.
        """

    def release(self, *, is_over: bool = False) -> None:
        """Give the run up, also for the processes that have inherited the claim.

        Parameters
        ----------
        is_over : bool
            Whether nobody will claim the run again.
        """


class RunClaims(Protocol):
    """The claims of all runs, whoever holds them."""

    def claim(self, run: RunFolder) -> RunClaim | None:
        """Claim a run that nobody holds, or take it over from a holder that is gone.

        Returns
        -------
        RunClaim or None
            None while another launcher holds it, or processes that it has left behind.

        Raises
        ------
        OSError
            If its folder cannot be written to, or there can be no claims in it.
        """

    def holder(self, run: RunFolder) -> str | None:
        """Name who holds a run, or whose processes do; None where nobody does."""


@dataclass(frozen=True)
class _LockClaim:
    lock: Lock

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.lock.descriptor,)

    def renew(self) -> None:
        """Nothing to do: the system keeps a lock as long as one of its holders lives."""

    def release(self, *, is_over: bool = False) -> None:
        self.lock.release(remove=is_over)


class _LockClaims:
    """Claims by `flock`: a killed launcher's ends with the last process that inherited it."""

    def claim(self, run: RunFolder) -> RunClaim | None:
        run.path.mkdir(parents=True, exist_ok=True)
        lock = take(run.lock)
        if lock is None:
            return None
        with suppress(OSError):  # for messages only; a full disk takes nothing from the lock
            os.ftruncate(lock.descriptor, 0)
            name = f"process {os.getpid()} on {platform.node()}"
            os.pwrite(lock.descriptor, name.encode(), 0)
        return _LockClaim(lock)

    def holder(self, run: RunFolder) -> str | None:
        if not is_held(run.lock):
            return None
        with suppress(OSError):
            return run.lock.read_text(errors="replace") or "an unknown process"
        return "an unknown process"


CLAIMS: RunClaims = _LockClaims()
