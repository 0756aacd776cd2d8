"""How long anything that concerns Weights & Biases may take. Nothing else waits for it.

=====================================  =============================================  =========
wait                                   ends with                                      default
=====================================  =============================================  =========
W&B opens a run                        the mirror starts anew, offline                30 s
W&B takes rows, or the end of a run    the mirror starts anew, offline                130 s
the server shows the end of a run      the mirror starts anew, offline                20 s
the server answers to a key (`sync`)   `batchscape sync` ends, exit code 2            50 s
one run (`sync`)                       the next run                                   `--timeout`
the mirror shows no progress           the launcher kills it                          180 s
the mirror as a whole                  the launcher kills it                          60 s and
                                                                                      10 s a run
the mirror, after Ctrl-C               the launcher kills it                          5 s
=====================================  =============================================  =========

All but the whole, Ctrl-C and `--timeout` follow `WANDB_INIT_TIMEOUT`, which W&B knows too, up to
600 s.
"""

from __future__ import annotations

import math
import os

__all__ = [
    "INTERRUPTED_S",
    "OFFLINE_S",
    "closing_s",
    "contact_s",
    "opening_s",
    "patience_s",
    "stall_s",
    "whole_s",
]

OFFLINE_S = 60.0
"""At least, for what W&B writes offline: only a busy machine is waited for there."""
INTERRUPTED_S = 5.0
"""For the mirror, once the user has asked for the end."""
_PATIENCE_S = 20.0
_MOST_PATIENCE_S = 600.0
_LEAST_GRACE_S = 2.0
_CLOSING_PATIENCES = 6.0
_CONTACT_PATIENCES = 2.0
_STALL_PATIENCES = 8.0
"""More than a closing, after which the mirror itself goes on offline."""
_BASE_S = 60.0
_PER_RUN_S = 10.0


def patience_s() -> float:
    """Return the time that W&B itself has to open a run, and to show its end, in seconds."""
    try:
        given = float(os.environ.get("WANDB_INIT_TIMEOUT", _PATIENCE_S))
    except ValueError:
        return _PATIENCE_S
    return min(given, _MOST_PATIENCE_S) if given > 0 and not math.isnan(given) else _PATIENCE_S


def _grace_s() -> float:
    """Return by how much W&B may exceed its own timeout; after that, it is taken to hang."""
    return max(_LEAST_GRACE_S, patience_s() / 2)


def opening_s() -> float:
    """Return after how long a run that does not open is given up, in seconds."""
    return patience_s() + _grace_s()


def closing_s() -> float:
    """Return after how long rows, or the end of a run, are given up that are not taken."""
    return _CLOSING_PATIENCES * patience_s() + _grace_s()


def contact_s() -> float:
    """Return how long `batchscape sync` waits for the first answer of a server, in seconds."""
    return _CONTACT_PATIENCES * patience_s() + _grace_s()


def stall_s() -> float:
    """Return after how long without progress the launcher ends a mirror, in seconds."""
    return max(OFFLINE_S * 3 / 2, _STALL_PATIENCES * patience_s() + 2 * _grace_s())


def whole_s(runs: int) -> float:
    """Return after how long the launcher ends a mirror, whatever its progress, in seconds."""
    return _BASE_S + _PER_RUN_S * runs
