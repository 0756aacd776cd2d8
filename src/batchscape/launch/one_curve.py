"""One curve a trajectory: which runs of a launch are trained in full, and which as far as a prefix.

The rule: of the runs of a trajectory the one that should take the least device time is trained in
full: that with the largest micro-batch, and of several on the fewest devices. The others wait until
it is over, and then have a prefix each (`record.prefix`), which is held against it before they are
sealed. Where it did not complete, the next one is trained in full; so is every run whose model
depends on the cut (`not_invariant`, as found out when the first one began), and every run that has
a checkpoint at the end of its prefix or beyond: its prefix was another, or it was begun in full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from batchscape.record.folder import SweepFolder
from batchscape.record.prefix import prefix_steps
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus, Status, StopReason

__all__ = ["OneCurve", "Prefix", "trained_in_full"]


class Prefix(NamedTuple):
    """What a run is trained as far as."""

    optimizer_steps: int
    of: str
    """The run whose curve stands for its own."""


def trained_in_full(specs: Iterable[RunSpec]) -> frozenset[str]:
    """Return the runs that are trained in full where nothing goes wrong."""
    full: set[str] = set()
    short: list[RunSpec] = []
    for spec in specs:
        if prefix_steps(spec) is None:
            full.add(spec.run_id)
        else:
            short.append(spec)
    first: dict[str, str] = {}
    for spec in sorted(short, key=_cost):
        first.setdefault(spec.trajectory_id, spec.run_id)
    return frozenset(full | set(first.values()))


def _cost(spec: RunSpec) -> tuple[int, int, str]:
    """Order runs of one trajectory by the device time that they should take; all seeds alike."""
    config = replace(spec.config, seed=0, init_seed=None, data_seed=None)
    return -spec.geometry.micro_batch_size, spec.geometry.data_parallel_size, repr(config)


class OneCurve:
    """What is known of the trajectories of a launch.

    Parameters
    ----------
    specs : sequence of RunSpec
        All runs of the launch.
    sweep : SweepFolder
    over : collection of str
        Those that ended in earlier launches.
    """

    def __init__(
        self, specs: Sequence[RunSpec], sweep: SweepFolder, over: Collection[str] = ()
    ) -> None:
        self._sweep = sweep
        self._members: dict[str, list[str]] = {}
        self._trajectory: dict[str, str] = {}
        self._cost: dict[str, tuple[int, int, str]] = {}
        for spec in specs:
            if prefix_steps(spec) is not None:
                self._members.setdefault(spec.trajectory_id, []).append(spec.run_id)
                self._trajectory[spec.run_id] = spec.trajectory_id
                self._cost[spec.run_id] = _cost(spec)
        for members in self._members.values():
            members.sort(key=self._cost.__getitem__)
        self._over: set[str] = set()
        self._full: dict[str, str | None] = {}
        """By trajectory, the run whose curve stands for it; None: for each its own."""
        for run_id in over:
            self.ended(run_id)

    def ended(self, run_id: str) -> None:
        """Take note that a run is over, whoever launched it."""
        self._over.add(run_id)
        trajectory = self._trajectory.get(run_id)
        if trajectory is None or trajectory in self._full:
            return
        status = RunStatus.if_readable(self._sweep.run(run_id).status)
        if status is None:
            return
        if status.status is Status.COMPLETED and status.stop_reason is not StopReason.PREFIX:
            depends = status.summary.get("not_invariant") is not None
            self._full[trajectory] = None if depends else run_id

    def ready(
        self, queue: deque[RunSpec], active: Collection[str], elsewhere: Collection[str]
    ) -> deque[RunSpec]:
        """Return the runs that need not wait for another one of their trajectory.

        Parameters
        ----------
        queue : deque of RunSpec
        active, elsewhere : collection of str
            Runs at work here, and those that another launcher has.
        """
        if not self._members:
            return queue
        busy = {self._trajectory.get(run_id) for run_id in (*active, *elsewhere)}
        waiting = [spec.run_id for spec in queue if spec.run_id in self._cost]
        first: dict[str, str] = {}
        for run_id in sorted(waiting, key=self._cost.__getitem__):
            first.setdefault(self._trajectory[run_id], run_id)

        def is_ready(spec: RunSpec) -> bool:
            trajectory = self._trajectory.get(spec.run_id)
            if trajectory is None or trajectory in self._full:
                return True
            return trajectory not in busy and first[trajectory] == spec.run_id

        return deque(spec for spec in queue if is_ready(spec))

    def prefix_of(self, spec: RunSpec) -> Prefix | None:
        """Return what a run that begins now is trained as far as; None: it is trained in full."""
        full, steps = self._full.get(spec.trajectory_id), prefix_steps(spec)
        if full is None or steps is None:
            return None
        done = self._sweep.run(spec.run_id).checkpoint_step
        return None if done is not None and done >= steps else Prefix(steps, full)

    def samples(self, spec: RunSpec) -> int:
        """Return how many samples a run that is not over will be trained for, as far as known."""
        steps = prefix_steps(spec)
        if steps is None:
            return spec.samples
        if spec.trajectory_id in self._full:
            is_short = self.prefix_of(spec) is not None
        else:
            open_ones = (run for run in self._members[spec.trajectory_id] if run not in self._over)
            is_short = next(open_ones, spec.run_id) != spec.run_id
        return steps * spec.geometry.global_batch_size if is_short else spec.samples
