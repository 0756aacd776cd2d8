"""Which part of the data is held out, by a draw that every item has of its own."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["choose", "draw"]


def draw(content: bytes) -> float:
    """Return the draw of an item, uniform in [0, 1): a hash of what names it."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


def choose(draws: NDArray[np.float64], held_out_pct: float) -> NDArray[np.bool_]:
    """Choose the items to hold out, so that one more item moves no other.

    Parameters
    ----------
    draws : float64 array, shape (items,), two or more
    held_out_pct : float
        Share that is expected to be held out, in percent.

    Returns
    -------
    bool array, shape (items,)
        Neither all false nor all true: where few items leave one part empty, the extreme draw
        decides.
    """
    chosen = 100 * draws < held_out_pct
    if not chosen.any():
        chosen[np.argmin(draws)] = True
    if chosen.all():
        chosen[np.argmax(draws)] = False
    return chosen
