"""Workers whose wall clock jumps."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fake_workers import Rank

from batchscape.record.status import Outcome, Status


def consequence(rank: Rank) -> int:
    """Fail in rank 0, whose clock has jumped; its peer fails of that, a moment later."""
    real = time.time
    if rank.rank == 0:
        time.time = lambda: real() + float(os.environ["JUMP_S"])
    elif not wait_for(rank.folder.outcome(0)):
        return 1
    reason = "the cause" if rank.rank == 0 else "the consequence"
    Outcome(Status.FAILED, reason=reason, phase="start", optimizer_step=0).write(
        rank.folder, rank.rank
    )
    return 1


def wait_for(path: Path) -> bool:
    deadline = time.monotonic() + 30
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def fails(rank: Rank) -> int:
    rank.rows(rank.attempt + 1, rank.attempt + 1)
    return rank.outcome("failed", "planted")


def main(run_dir: str, rank: int) -> int:
    """Behave as the run's name says."""
    behaviour = {"consequence": consequence, "fails": fails}
    return behaviour[Path(run_dir).name.split("-")[0]](Rank(run_dir, rank))
