"""The place of the run that waits next: who may overtake it, and how often."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

__all__ = ["Reservation"]


@dataclass(frozen=True)
class Reservation:
    """Devices kept for the run that is to start next and does not fit yet.

    Estimates may be wrong, so that what the plan allows is not enough. Another run may start first
    only

    1. if, by its estimate, it ends before the start that was promised when the waiting began, or
    2. on devices that the waiting run does not need, or
    3. as one of at most as many others as there are devices.

    Whatever the estimates are, the waiting run therefore starts once the runs have ended that were
    at work when its promised time came, and at most that number more.
    """

    run: str
    """Name of the run that waits."""
    width: int
    """Devices that it needs."""
    since_s: float
    """When it became the next one, on the caller's clock."""
    promised_s: float | None
    """When it should start, by what was estimated then; None where nothing was known."""
    beside: tuple[tuple[str, int], ...] = ()
    """Runs that started on devices that it does not need, each with the number of them."""
    overtaken: int = 0
    """Runs let pass by the third rule."""

    def vouched(self, ends_at_s: float | None) -> bool:
        """Whether a run that starts now ends early enough by its estimate (rule 1)."""
        return (
            self.promised_s is not None
            and ends_at_s is not None
            and ends_at_s <= self.promised_s * (1 + 1e-9)
        )

    def let_pass(
        self, run: str, width: int, ends_at_s: float | None, slots: int, runs: int
    ) -> Reservation | None:
        """Let another run start first.

        Parameters
        ----------
        run : str
        width : int
            Devices that it takes.
        ends_at_s : float or None
            When it ends by its estimate, on the caller's clock.
        slots : int
            Devices in all; also the number of runs that the third rule lets pass.
        runs : int
            Runs that may be at work at once.

        Returns
        -------
        Reservation or None
            What is kept from then on; None if the run may not pass.
        """
        if self.vouched(ends_at_s):
            return self
        taken = sum(devices for _, devices in self.beside)
        if taken + width + self.width <= slots and len(self.beside) + 2 <= runs:
            return replace(self, beside=(*self.beside, (run, width)))
        if self.overtaken < slots:
            return replace(self, overtaken=self.overtaken + 1)
        return None

    def without_ended(self, running: Collection[str]) -> Reservation:
        """Forget runs that have ended."""
        left = tuple(entry for entry in self.beside if entry[0] in running)
        return self if left == self.beside else replace(self, beside=left)
