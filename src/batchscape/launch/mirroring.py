"""When a sweep is mirrored to its tracker: beside runs only where that costs them nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from batchscape.config import Tracker, WandbTracker
from batchscape.errors import BatchscapeError
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec

if TYPE_CHECKING:
    from batchscape.plan.machine import Machine
    from batchscape.record.mirror import MirrorProcess

__all__ = ["Mirroring", "may_mirror_live"]


def may_mirror_live(specs: Sequence[RunSpec], machine: Machine) -> bool:
    """Return whether the mirror can work beside timed runs without taking anything from them."""
    if not specs or any(spec.device_type != "cuda" for spec in specs):
        return False
    ranks = max(spec.geometry.data_parallel_size for spec in specs)
    return machine.cpu_cores > 2 * ranks * specs[0].config.launcher.concurrent_runs + 2


class Mirroring:
    """The mirror of one launch; nothing at all without a tracker, or with a disabled one.

    What goes wrong here is told, and stops no training. Every wait has a bound, of
    `record.mirror_bounds`.

    Parameters
    ----------
    tracker : WandbTracker or NoTracker
    sweep : SweepFolder
    live : bool
        Whether to mirror from now on, else only in `finish`.
    """

    def __init__(self, tracker: Tracker, sweep: SweepFolder, *, live: bool) -> None:
        self._tracker = (
            tracker if isinstance(tracker, WandbTracker) and tracker.mode != "disabled" else None
        )
        self._sweep = sweep
        self._process: MirrorProcess | None = None
        self._problem: str | None = None
        if live:
            self._start(live=True)

    def finish(self, runs: int, *, interrupted: bool) -> str | None:
        """Mirror what is left.

        Parameters
        ----------
        runs : int
            Runs of the sweep.
        interrupted : bool
            Whether the user waits for the end.

        Returns
        -------
        str or None
            What was not mirrored, and how to get it later; None where all was.
        """
        if self._tracker is None:
            return None
        try:
            return self._finish(runs, interrupted=interrupted)
        except KeyboardInterrupt:
            return self._not_updated("the wait for it was interrupted")
        except Exception as error:  # noqa: BLE001  (what goes wrong here must fail no sweep)
            return self._not_updated(f"{type(error).__name__}: {error}")

    def _finish(self, runs: int, *, interrupted: bool) -> str | None:
        from batchscape.record import mirror_bounds

        if interrupted:
            if self._process is None:
                return self._not_updated("the sweep was interrupted")
            return self._waited(mirror_bounds.INTERRUPTED_S)
        if self._process is not None and self._process.has_failed:
            # Killed or broken on the way: another one catches up.
            self._process.finish(0.0)
            self._process = None
        if self._process is None:
            self._start(live=False)
        if self._process is None:
            return self._problem
        bounds = mirror_bounds.whole_s(runs), mirror_bounds.stall_s()
        note = self._waited(*bounds)
        if note is not None and self._process.has_failed:
            self._start(live=False)  # once: what fails twice is told
            note = self._waited(*bounds)
        return note

    def _waited(self, timeout_s: float, stall_s: float = math.inf) -> str | None:
        if self._process is None:
            return self._problem
        try:
            return self._process.finish(timeout_s, stall_s)
        except KeyboardInterrupt:
            return self._process.finish(0.0)

    def _not_updated(self, why: str) -> str:
        from batchscape.record.mirror_state import sync_command

        command = sync_command(self._sweep.path)
        return f"Weights & Biases was not updated: {why}. `{command}` sends what it lacks."

    def standing(self) -> str | None:
        """Say where W&B has the runs of the sweep; None where it has none."""
        if self._tracker is None:
            return None
        from batchscape.record.mirror_state import describe_standing

        with suppress(OSError):
            return describe_standing(self._sweep)
        return None

    def _start(self, *, live: bool) -> None:
        if self._tracker is not None:
            from batchscape.record import mirror  # only where a mirror is asked for

            try:
                self._process = mirror.start(self._sweep.path, self._tracker, live=live)
            except (BatchscapeError, OSError) as error:
                self._process = None
                self._problem = self._not_updated(f"its mirror cannot start ({error})")
