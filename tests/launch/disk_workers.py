"""Workers that meet a full disk, or make one."""

from __future__ import annotations

import os
from pathlib import Path

from fake_workers import Rank


def fill_disk(rank: Rank) -> None:
    """Take all that is left of the disk that the sweep is on."""
    sweep = rank.folder.path.parents[1]
    disk = os.statvfs(sweep)
    with (sweep / "filler").open("wb") as file:
        file.write(bytes(disk.f_bavail * disk.f_frsize))


def writes(rank: Rank) -> int:
    """Write rows until the disk is full; complete in the second attempt."""
    if rank.attempt:
        return rank.complete()
    rank.rows(1, 2)
    fill_disk(rank)
    for k in range(3, 1000):
        rank.rows(k, k)
    return rank.outcome("failed", "the disk was never full")


def seals(rank: Rank) -> int:
    """Complete, and leave a full disk to the launcher; to be sealed without being trained again."""
    if rank.attempt:
        return rank.outcome("failed", "it was done already")
    code = rank.complete()
    fill_disk(rank)
    return code


def completes(rank: Rank) -> int:
    """Meet no trouble."""
    return rank.complete()


def trains(run_dir: str, rank: int) -> int:
    """Train for real on a disk that is full once a checkpoint is written."""
    from batchscape.train import loop, worker

    real = loop.Training._save

    def save(self: loop.Training) -> None:
        real(self)
        fill_disk(Rank(run_dir, rank))

    loop.Training._save = save  # a planted fault
    return worker.main(run_dir, rank)


def main(run_dir: str, rank: int) -> int:
    """Behave as the run's name says."""
    behaviour = {"writes": writes, "seals": seals, "completes": completes}
    return behaviour[Path(run_dir).name.split("-")[0]](Rank(run_dir, rank))
