"""Why a launch starts no more runs although some are left."""

from __future__ import annotations

from batchscape.launch.result import RunResult
from batchscape.record.status import FAULTS

__all__ = ["Stopping"]


class Stopping:
    """What speaks against starting another run; signals are told apart from it.

    Parameters
    ----------
    max_failures : int or None
        Once so many runs of this launch have ended by a fault, no more are started.

    Attributes
    ----------
    reason : str or None
        The first that there was; None while nothing is in the way.
    """

    def __init__(self, max_failures: int | None) -> None:
        self._max_failures = max_failures
        self._failures = 0
        self.reason: str | None = None

    def because(self, reason: str) -> None:
        """Start no more: the machine is in the way."""
        self.reason = self.reason or reason

    def because_of_the_disk(self, trouble: str) -> None:
        """Start no more: their folders could not be written to."""
        self.because(f"{trouble}; make space, then the same command goes on")

    def count(self, result: RunResult) -> None:
        """Take note of how a run ended."""
        self._failures += result.status in FAULTS and not result.by_another
        if self._max_failures is not None and self._failures >= self._max_failures:
            count = "1 run has" if self._failures == 1 else f"{self._failures} runs have"
            self.because(f"{count} failed, and launcher.max_failures is {self._max_failures}")
