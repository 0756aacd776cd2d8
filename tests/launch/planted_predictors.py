"""Predictors that say something, or fail in one way each."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from batchscape.record.files import write_json


def says(folder: str, _rank: int) -> int:
    place = Path(folder)
    runs = [path.stem for path in place.glob("*.json")]
    predictions = {run: {"run_time_s": {"value": 7.0, "method": "x"}} for run in runs}
    write_json(place / "predictions", predictions)
    return 0


def raises(_folder: str, _rank: int) -> int:
    msg = "planted"
    raise ValueError(msg)


def leaves(_folder: str, _rank: int) -> int:
    return 3


def is_killed(_folder: str, _rank: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def hangs(_folder: str, _rank: int) -> int:
    time.sleep(600)
    return 0
