"""Which is the largest micro-batch that fits: a search by real trainings, begun at a prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchscape.geometry import BatchGeometry

__all__ = ["Tried", "expected_largest", "seek_largest"]

_STEP = 1.3
"""How far the expectation goes down once it was too high."""
_TRUSTED = 3
"""Trainings that go where the prediction says; later ones halve what is left."""


@dataclass(frozen=True)
class Tried:
    """What a real training with one micro-batch came to."""

    geometry: BatchGeometry
    fits: bool
    taken_gib: float | None = None
    """Memory that the limit is held against, of one that fits."""
    run_id: str = ""


def seek_largest(
    candidates: Sequence[BatchGeometry],
    expected: Callable[[Sequence[Tried]], int | None],
    attempt: Callable[[BatchGeometry], Tried],
) -> list[Tried]:
    """Try geometries until the last that fits and the first that does not are neighbours.

    Parameters
    ----------
    candidates : sequence of BatchGeometry
        In the order of their micro-batches. Where one does not fit, no later one does.
    expected : callable
        Takes what was tried and returns the position of the last candidate that should fit, -1
        where none should; None: nothing is known.
    attempt : callable
        Trains one for a few steps.

    Returns
    -------
    list of Tried
        In the order in which they were tried: with a right expectation two at most.
    """
    tried: list[Tried] = []
    last, first_out = -1, len(candidates)
    while first_out - last > 1:
        guess = expected(tried) if len(tried) < _TRUSTED else None
        if guess is None:
            position = (last + first_out) // 2
        else:
            # What should fit is tried first; once it does, the next one should not.
            position = min(max(guess, last + 1), first_out - 1)
        outcome = attempt(candidates[position])
        tried.append(outcome)
        if outcome.fits:
            last = position
        else:
            first_out = position
    return tried


def expected_largest(
    predicted_gib: Sequence[float],
    limit_gib: float,
    fitted: Sequence[tuple[int, float]],
    *,
    times: float,
    beside_gib: float = 0.0,
    first_out: int | None = None,
) -> int:
    """Return the position of the last candidate that should fit.

    What a limit counts is more than tensors: libraries take memory too, and allocators keep some.
    How many times as much, the largest training that fits tells. Before one does, the smallest that
    did not tells that it is more than was thought, and by how much is tried.

    Parameters
    ----------
    predicted_gib : sequence of float, shape (candidates,)
        Peak of tensors, in the order of the micro-batches.
    limit_gib : float
    fitted : sequence of (int, float)
        Position and memory taken of trainings that fit.
    times : float
        How many times as much before anything was trained.
    beside_gib : float
        What is taken whatever the tensors are.
    first_out : int, optional
        Position of the smallest that did not fit.

    Returns
    -------
    int
        -1 where not even the first should.
    """
    if fitted:
        position, taken_gib = max(fitted)
        times = (taken_gib - beside_gib) / predicted_gib[position]
    elif first_out is not None:
        times = _STEP * (limit_gib - beside_gib) / predicted_gib[first_out]
    return sum(beside_gib + times * gib <= limit_gib for gib in predicted_gib) - 1
