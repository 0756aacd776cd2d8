"""Runs of several widths, planned on devices ahead of time so that the last one ends early.

Devices are interchangeable, so a plan needs only counts: a run that starts at a moment at which
enough devices are free keeps the same ones to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Piece", "Timeline", "plan"]

EXACT_RUNS = 9
"""Up to so many runs, all orders are searched, within the budget below."""
_PLACEMENTS = 4_000
"""Places that the search of orders may look for: some hundredths of a second."""
_ROUNDING = 1e-12
WINDOW = 48
"""Runs planned ahead, the longest ones; shorter ones fill what they leave free now."""


@dataclass(frozen=True)
class Piece:
    """A run as the plan sees it."""

    key: int
    """Names it to the caller, and decides between equals: the lower goes first."""
    width: int
    """Devices (or shares of devices) that it holds."""
    duration_s: float


class Timeline:
    """What is free from now on, as steps in time.

    Parameters
    ----------
    slots : int
        Devices, or shares of devices, that are free when nothing runs.
    runs : int
        Runs that may be at work at once.
    """

    def __init__(self, slots: int, runs: int) -> None:
        self.times = [0.0]
        """When each step begins, in seconds from now."""
        self.slots = [slots]
        self.runs = [runs]

    def copy(self) -> Timeline:
        """Return one that can be changed apart."""
        other = Timeline.__new__(Timeline)
        other.times, other.slots, other.runs = self.times[:], self.slots[:], self.runs[:]
        return other

    def earliest(self, width: int, duration_s: float) -> float:
        """Return the first time at which so many slots are free for so long."""
        times, slots, runs = self.times, self.slots, self.runs
        first, count = 0, len(times)
        while True:
            while slots[first] < width or runs[first] < 1:
                first += 1
            end = times[first] + duration_s
            step = first + 1
            while step < count and times[step] < end:
                if slots[step] < width or runs[step] < 1:
                    break
                step += 1
            else:
                return times[first]
            first = step + 1

    def add(self, start_s: float, width: int, duration_s: float) -> None:
        """Take slots from a time on for so long."""
        first, last = self._cut(start_s), self._cut(start_s + duration_s)
        for step in range(first, last):
            self.slots[step] -= width
            self.runs[step] -= 1

    def _cut(self, at_s: float) -> int:
        """Return the step that begins at a time, which it may make."""
        times = self.times
        step = len(times)
        while times[step - 1] > at_s:
            step -= 1
        if times[step - 1] == at_s:
            return step - 1
        times.insert(step, at_s)
        self.slots.insert(step, self.slots[step - 1])
        self.runs.insert(step, self.runs[step - 1])
        return step


def plan(
    pieces: Sequence[Piece], timeline: Timeline, *, in_order: bool = False
) -> dict[int, float]:
    """Return when each run should start, in seconds from now.

    The longest runs are placed one after the other, each as early as those before it allow, in
    the best of several orders: longest, widest or largest first, and where they are few, the best
    of all orders: some order gives an optimal plan, because no run of a plan that cannot be
    tightened could start earlier than right after those that start before it. Of plans that end
    at the same time the one with the longest first is taken.

    Parameters
    ----------
    pieces : sequence of Piece
        What is to be started; each fits on what is free when nothing runs.
    timeline : Timeline
        What is free; left as it is.
    in_order : bool
        Keep the order of the keys: durations say nothing.

    Returns
    -------
    dict
        Start by key, of those within the window and of those that can start now beside them.
    """
    if in_order:
        orders = [sorted(pieces, key=lambda piece: piece.key)]
    else:
        orders = [
            sorted(pieces, key=lambda p: (-p.duration_s, -p.width, p.key)),
            sorted(pieces, key=lambda p: (-p.width, -p.duration_s, p.key)),
            sorted(pieces, key=lambda p: (-p.width * p.duration_s, -p.width, p.key)),
        ]
    first = orders[0]
    window, rest = first[:WINDOW], first[WINDOW:]
    within = {piece.key for piece in window}
    search = _Search(window, timeline)
    for order in orders:
        search.attempt([piece for piece in order if piece.key in within])
    if not in_order and len(window) <= EXACT_RUNS:
        search.all_orders()
    return _filled(search.best, window, rest, timeline)


def _filled(
    starts: dict[int, float], window: Sequence[Piece], rest: Sequence[Piece], timeline: Timeline
) -> dict[int, float]:
    """Add what can start now without delaying anything that is planned."""
    if not rest:
        return starts
    planned = timeline.copy()
    for piece in window:
        planned.add(starts[piece.key], piece.width, piece.duration_s)
    for piece in rest:
        if planned.slots[0] < 1 or planned.runs[0] < 1:
            break
        if planned.slots[0] >= piece.width and not planned.earliest(piece.width, piece.duration_s):
            planned.add(0.0, piece.width, piece.duration_s)
            starts[piece.key] = 0.0
    return starts


def _least_s(pieces: Sequence[Piece], timeline: Timeline) -> float:
    """Return a time before which no plan can end: that of the longest run, or of all work."""
    steps = list(
        zip(timeline.times, timeline.times[1:], timeline.slots, timeline.runs, strict=False)
    )
    slots, runs = timeline.slots[-1], timeline.runs[-1]
    work = sum(piece.width * piece.duration_s for piece in pieces)
    work += sum((end - begin) * (slots - free) for begin, end, free, _ in steps)
    time_s = sum(piece.duration_s for piece in pieces)
    time_s += sum((end - begin) * (runs - free) for begin, end, _, free in steps)
    ends = [timeline.earliest(p.width, p.duration_s) + p.duration_s for p in pieces]
    return max(work / slots, time_s / runs, *ends) * (1 + _ROUNDING) if ends else 0.0


class _Search:
    """The best plan so far, and the search for a better one."""

    def __init__(self, pieces: Sequence[Piece], timeline: Timeline) -> None:
        self._timeline = timeline
        self._pieces = pieces
        self._left = _PLACEMENTS
        self._end_s = float("inf")
        self.best: dict[int, float] = {}
        self._least_s = _least_s(pieces, timeline)

    def attempt(self, order: Sequence[Piece]) -> None:
        """Place runs in an order."""
        timeline, starts, end_s = self._timeline.copy(), {}, 0.0
        for piece in order:
            start = starts[piece.key] = timeline.earliest(piece.width, piece.duration_s)
            timeline.add(start, piece.width, piece.duration_s)
            end_s = max(end_s, start + piece.duration_s)
        self._keep(starts, end_s)

    def all_orders(self) -> None:
        """Try every order in which runs begin one after the other."""
        kinds: dict[tuple[int, float], list[int]] = {}
        for piece in self._pieces:
            kinds.setdefault((piece.width, piece.duration_s), []).append(piece.key)
        self._descend(self._timeline, kinds, {}, 0.0, 0.0)

    def _descend(
        self,
        timeline: Timeline,
        kinds: dict[tuple[int, float], list[int]],
        starts: dict[int, float],
        last_s: float,
        end_s: float,
    ) -> None:
        if not kinds:
            self._keep(starts, end_s)
            return
        self._left -= len(kinds)
        places = [(timeline.earliest(*kind), kind) for kind in kinds]
        if max(end_s, *(start + kind[1] for start, kind in places)) >= self._end_s:
            return
        for start, kind in sorted(places, key=lambda place: (place[0], -place[1][1], -place[1][0])):
            # Sorted by their starts, the runs of any plan that cannot be tightened give that plan.
            if start < last_s or self._left <= 0 or self._end_s <= self._least_s:
                continue
            after = timeline.copy()
            after.add(start, *kind)
            others = {k: keys[1:] if k == kind else keys for k, keys in kinds.items()}
            self._descend(
                after,
                {k: keys for k, keys in others.items() if keys},
                {**starts, kinds[kind][0]: start},
                start,
                max(end_s, start + kind[1]),
            )

    def _keep(self, starts: dict[int, float], end_s: float) -> None:
        if end_s < self._end_s:
            self.best, self._end_s = starts, end_s
