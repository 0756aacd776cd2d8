"""How long a run should take, by the runs of the sweep that are over, and by what was predicted.

The rule: a run of the same cell (all alike but seeds, repeats, numbers of the optimizer and the
budget) takes its time a sample for the samples that are left, and its time to start. Of several
runs of a cell the median counts. Where the cell has none yet, the predicted time of its training is
scaled by what runs that are over took over theirs, and they tell the time to start: medians again,
of the runs with the nearest number of ranks, since ranks that share cores are the worst predicted.
Before the first is over the prediction is taken as it is. A run without one takes as long as the
one of those runs with the nearest budget in samples; before the first is over nothing is known of
it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from statistics import median

from batchscape.record.disk import read_each
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import RunStatus

__all__ = ["Duration", "Durations"]

_START_S = 1.0
"""Time to start and to end, before a run has told: forked ranks of small models took up to 0.8."""


@dataclass(frozen=True)
class Duration:
    """What a run took."""

    fixed_s: float
    """Time that does not grow with the budget: start, compilation, and the processes' end."""
    per_sample_s: float
    """Time of a training sample, evaluations and checkpoints included."""

    @classmethod
    def of(cls, status: RunStatus) -> Duration | None:
        """Return the duration of a run that is over; None where its record does not say."""
        figures = status.summary
        samples = figures.get("samples")
        if not status.status.is_sealed or not samples:
            return None
        if figures.get("train_time_s") is None:
            spans = [(a.started_at, a.ended_at) for a in status.attempts]
            wall_s = sum(end - start for start, end in spans if end is not None)
            return cls(0.0, wall_s / samples) if wall_s > 0 else None
        grown_s = sum(
            figures.get(n) or 0.0 for n in ("train_time_s", "evaluation_s", "checkpoint_s")
        )
        fixed_s = sum(figures.get(name) or 0.0 for name in ("startup_s", "compile_s"))
        if len(status.attempts) == 1 and (ended_at := status.attempts[0].ended_at) is not None:
            # Its processes come and go, which no rank sees.
            fixed_s = max(fixed_s, ended_at - status.attempts[0].started_at - grown_s)
        return cls(fixed_s, grown_s / samples)

    def takes_s(self, samples: int) -> float:
        """Return the time for so many samples."""
        return self.fixed_s + self.per_sample_s * samples


class Durations:
    """Expected durations, better known with every run that ends.

    Parameters
    ----------
    sweep : SweepFolder
        Its runs that are over are looked up when a duration is first asked for.
    specs : iterable of RunSpec
        Runs of the sweep.
    predicted_s : mapping of str to float
        What a whole run was predicted to take, in seconds, by `run_id`.
    """

    def __init__(
        self,
        sweep: SweepFolder,
        specs: Iterable[RunSpec],
        predicted_s: Mapping[str, float],
    ) -> None:
        self._sweep = sweep
        self._predicted_s = predicted_s
        self._specs = list(specs)
        self._cells: defaultdict[str, list[Duration]] = defaultdict(list)
        self._of_ranks: defaultdict[int, list[tuple[RunSpec, Duration]]] = defaultdict(list)
        self._done: dict[str, int] = {}
        self._key_of: dict[str, str] = {}
        self._answers: dict[tuple[str, int], float | None] = {}
        self._nearest: dict[tuple[int, int], Duration | None] = {}
        """By ranks and samples: cells without a duration of their own are mostly alike in these."""
        self._learnt: dict[int, tuple[float, float]] = {}
        """By ranks: the time to start, and what runs took over what was predicted of them."""
        self._is_read = False

    def learn(self, spec: RunSpec, status: RunStatus) -> None:
        """Take note of how a run ended."""
        self._answers.clear()
        self._nearest.clear()
        self._learnt.clear()
        duration = Duration.of(status)
        if duration is None:
            self._done[spec.run_id] = int(status.summary.get("samples") or 0)
            return
        self._cells[self._key(spec)].append(duration)
        self._of_ranks[spec.geometry.data_parallel_size].append((spec, duration))

    def expected_s(self, spec: RunSpec) -> float | None:
        """Return how long a run should take from now on, in seconds; None: nothing is known."""
        if not self._is_read:
            self._read()
        left = max(0, spec.samples - self._done.get(spec.run_id, 0))
        asked = self._key(spec), left
        if asked not in self._answers:
            duration = self._duration(spec)
            self._answers[asked] = None if duration is None else duration.takes_s(left)
        return self._answers[asked]

    def _duration(self, spec: RunSpec) -> Duration | None:
        same = self._cells.get(self._key(spec))
        if same:
            fixed_s = median(duration.fixed_s for duration in same)
            return Duration(fixed_s, median(duration.per_sample_s for duration in same))
        ranks = spec.geometry.data_parallel_size
        if predicted_s := self._predicted_s.get(spec.run_id):
            if ranks not in self._learnt:
                self._learnt[ranks] = self._start_and_scale(ranks)
            fixed_s, scale = self._learnt[ranks]
            return Duration(fixed_s, scale * predicted_s / spec.samples)
        if (ranks, spec.samples) not in self._nearest:
            self._nearest[ranks, spec.samples] = self._nearest_duration(spec, ranks)
        return self._nearest[ranks, spec.samples]

    def _start_and_scale(self, ranks: int) -> tuple[float, float]:
        as_wide = self._as_wide(ranks)
        starts = [over.fixed_s for _, over in as_wide] or [_START_S]
        scales = [
            over.per_sample_s * spec.samples / predicted_s
            for spec, over in as_wide
            if (predicted_s := self._predicted_s.get(spec.run_id))
        ]
        return median(starts), median(scales or [1.0])

    def _nearest_duration(self, spec: RunSpec, ranks: int) -> Duration | None:
        nearest = min(
            self._as_wide(ranks),
            key=lambda pair: abs(math.log(pair[0].samples / spec.samples)),
            default=None,
        )
        return None if nearest is None else nearest[1]

    def _as_wide(self, ranks: int) -> list[tuple[RunSpec, Duration]]:
        """Return the runs that are over with the nearest number of ranks."""
        nearest = min(self._of_ranks, key=lambda known: abs(math.log(known / ranks)), default=ranks)
        return self._of_ranks.get(nearest, [])

    def _read(self) -> None:
        self._is_read = True
        # Where one cannot be read, its launch will say what the matter is.
        paths = [self._sweep.run(spec.run_id).status for spec in self._specs]
        stood = read_each(RunStatus.if_readable, paths, self._sweep.path)
        for spec, status in zip(self._specs, stood, strict=True):
            if status is not None:
                self.learn(spec, status)

    def _key(self, spec: RunSpec) -> str:
        """Return what runs of equal duration share: geometries and `time_key`."""
        if spec.run_id not in self._key_of:
            stages = [astuple(stage.geometry) for stage in spec.stages]
            self._key_of[spec.run_id] = f"{stages} {spec.time_key}"
        return self._key_of[spec.run_id]
