"""The mirror of a launch: beside its runs only where that costs them nothing, else after them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from batchscape.config import Tracker, WandbTracker
from batchscape.outgoing import redact
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.tracking.state import standing_of, sync_command
from batchscape.tracking.watch import Order, Worker, silence_s

__all__ = ["Mirror", "may_mirror_live"]

_INTERRUPTED_S = 5.0
"""Once the user has asked for the end."""
_BASE_S = 60.0
_PER_RUN_S = 10.0


def may_mirror_live(specs: Sequence[RunSpec], cpu_cores: int) -> bool:
    """Return whether the mirror can work beside timed runs without taking anything from them."""
    if not specs or any(spec.device_type != "cuda" for spec in specs):
        return False
    ranks = max(spec.geometry.data_parallel_size for spec in specs)
    return cpu_cores > 2 * ranks * specs[0].config.launcher.concurrent_runs + 2


class Mirror:
    """The mirror of one launch; nothing at all without a tracker.

    What goes wrong here is told, and stops no training. Nobody waits for it before `finish`, so
    nobody looks after it before: a live one that has ended on the way is started again then.

    Parameters
    ----------
    tracker : WandbTracker or NoTracker
    sweep : SweepFolder
    live : bool
        Whether to mirror from now on, else only in `finish`.
    """

    def __init__(self, tracker: Tracker, sweep: SweepFolder, *, live: bool) -> None:
        self._tracker = tracker if isinstance(tracker, WandbTracker) else None
        self._sweep_dir = sweep.path.resolve()
        self._worker: Worker | None = None
        self._problems: list[str] = []
        if live and self._tracker is not None:
            self._start(self._tracker, live=True)

    def finish(self, runs: int, *, interrupted: bool) -> str | None:
        """Mirror what is left, within a bound.

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
            if interrupted:
                self._problems.append("the sweep was interrupted")
            elif self._worker is None or self._worker.has_ended:
                self._start(self._tracker, live=False)
            self._watch(_INTERRUPTED_S if interrupted else _BASE_S + _PER_RUN_S * runs)
        except KeyboardInterrupt:
            self._problems.append("the wait for it was interrupted")
        except Exception as error:  # noqa: BLE001  (what goes wrong here must fail no sweep)
            self._problems.append(f"{type(error).__name__}: {error}")
        finally:
            if self._worker is not None:
                self._worker.close()
        why = "; ".join(dict.fromkeys(self._problems))
        try:
            note = standing_of(self._sweep_dir).missing(why)
        except OSError as error:
            command = sync_command(self._sweep_dir)
            note = f"What Weights & Biases lacks is not known: {error}. `{command}` sends it."
        return None if note is None else redact(note)

    def standing(self) -> str | None:
        """Say where W&B has the runs of the sweep; None where it has none, or none can be read."""
        if self._tracker is not None:
            with suppress(OSError):  # `finish` has told it
                return str(standing_of(self._sweep_dir)) or None
        return None

    def _start(self, tracker: WandbTracker, *, live: bool) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        order = Order(
            str(self._sweep_dir),
            tracker.mode,
            live=live,
            waits=True,
            project=tracker.project,
            entity=tracker.entity,
            tags=tracker.tags,
        )
        try:
            self._worker = Worker(order)
        except OSError as error:
            self._problems.append(f"its mirror cannot start ({error})")

    def _watch(self, whole_s: float) -> None:
        """Let the worker mirror what is left; note what kept it from that."""
        if self._worker is None:
            return
        self._worker.ask_for_the_end()
        for _ in self._worker.events(silence_s(), whole_s):
            pass
        if self._worker.problem is not None:
            self._problems.append(self._worker.problem)
