"""What a sweep will write, against what its disk has left.

Of an open run there are its rows as lines and the newest checkpoints, and for a moment one more of
those. A sealed run has its rows as Parquet, and no checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchscape.config import Command, Sgd, WandbTracker
from batchscape.plan.parameters import count_parameters
from batchscape.record.disk import free_bytes, size_text
from batchscape.record.folder import CHECKPOINTS_KEPT, SweepFolder
from batchscape.record.spec import RunSpec

__all__ = [
    "DiskUse",
    "RunDiskUse",
    "describe_disk_use",
    "disk_use",
    "evaluations",
    "open_runs",
    "run_disk_use",
]

# Measured on runs of this version, in bytes.
_JSON_FILES = 24 * 1024
"""`config.json`, `status.json`, `launch.json`, `environment.json`, sketch and log, a short one."""
_EMPTY_TABLES = 45 * 1024
"""The three Parquet files without a row: most of it names the columns."""
_STEP_LINE, _STEP_ROW = 570, 90
_EVAL_LINE, _EVAL_ROW = 260, 60
_RANK_LINE, _RANK_ROW = 1200, 150
_RANDOM_STATE = 6 * 1024
"""Of each rank, in a checkpoint."""
_TENSOR = 700
"""Name, shape and padding of a tensor in a checkpoint."""
_TENSORS_A_LAYER = 12


@dataclass(frozen=True)
class RunDiskUse:
    """What one run writes, in bytes."""

    sealed: int
    """Once it is sealed."""
    checkpoint: int | None
    """One checkpoint; None where only the model's own code can tell its size."""
    peak: int
    """At most, while it is open; without checkpoints where those are unknown."""


@dataclass(frozen=True)
class DiskUse:
    """What a sweep writes, in bytes."""

    runs: int
    """Runs that are not sealed yet."""
    total: int
    """Of all those, once they are sealed."""
    peak: int
    """Needed at most at one time, with as many runs at once as are allowed."""
    largest_checkpoint: int
    unknown: int
    """Runs whose checkpoints are not counted."""
    free: int
    """What the disk has left."""
    mirrored: bool = False
    """Whether W&B keeps files of its own beside them, which are not counted."""

    @property
    def fits(self) -> bool:
        """Whether the disk has room for it."""
        return self.peak <= self.free


def run_disk_use(spec: RunSpec) -> RunDiskUse:
    """Estimate what a run writes.

    Parameters
    ----------
    spec : RunSpec

    Returns
    -------
    RunDiskUse
        A program's own files are not counted.
    """
    steps, evals = spec.optimizer_steps, evaluations(spec)
    ranks = spec.geometry.data_parallel_size
    tables = _EMPTY_TABLES + steps * _STEP_ROW + evals * _EVAL_ROW + ranks * _RANK_ROW
    lines = steps * _STEP_LINE + evals * _EVAL_LINE + ranks * _RANK_LINE
    sealed = _JSON_FILES + tables
    if isinstance(spec.config.engine, Command):
        return RunDiskUse(sealed, 0, sealed + lines)
    checkpoint = _checkpoint(spec)
    copies = CHECKPOINTS_KEPT + 1
    # Tables are written while the lines and the checkpoints are still there.
    peak = sealed + lines + copies * (checkpoint or 0)
    return RunDiskUse(sealed, checkpoint, peak)


def disk_use(specs: Sequence[RunSpec], sweep: SweepFolder) -> DiskUse:
    """Estimate what a sweep is still to write.

    Parameters
    ----------
    specs : sequence of RunSpec
    sweep : SweepFolder
        Runs that are sealed in it are not counted.
    """
    open_ones = open_runs(specs, sweep)
    each = [run_disk_use(spec) for spec in open_ones]
    total = sum(run.sealed for run in each)
    at_once = max((spec.config.launcher.concurrent_runs for spec in open_ones), default=0)
    extra = sorted((run.peak - run.sealed for run in each), reverse=True)[:at_once]
    return DiskUse(
        runs=len(open_ones),
        total=total,
        peak=total + sum(extra),
        largest_checkpoint=max((run.checkpoint or 0 for run in each), default=0),
        unknown=sum(run.checkpoint is None for run in each),
        free=free_bytes(sweep.path),
        mirrored=any(
            isinstance(tracker := spec.config.tracker, WandbTracker) and tracker.mode != "disabled"
            for spec in open_ones
        ),
    )


def open_runs(specs: Sequence[RunSpec], sweep: SweepFolder) -> list[RunSpec]:
    """Return the runs that are not sealed yet."""
    # By the folders that are there: a plan of 10,000 runs that are not is told at once.
    sealed = {f.path.name for f in sweep.run_folders() if f.parquet("steps").exists()}
    return [spec for spec in specs if spec.run_id not in sealed]


def describe_disk_use(use: DiskUse) -> str:
    """Say in words what a sweep will write, and whether there is room for it."""
    if use.runs == 0:
        return "Disk: nothing is left to write."
    count = "1 run" if use.runs == 1 else f"{use.runs} runs"
    text = f"Disk: about {size_text(use.total)} for {count}, {size_text(use.peak)} at most at once"
    if use.largest_checkpoint:
        text += (
            f" (checkpoints of up to {size_text(use.largest_checkpoint)}; a run keeps its newest "
            f"{CHECKPOINTS_KEPT} until it is sealed)"
        )
    if use.unknown:
        text += f"; not counted: checkpoints of {use.unknown}, whose models only their code knows"
    text += "; not counted: W&B's own files, which may be several times as large" * use.mirrored
    text += f". Free: {size_text(use.free)}."
    if use.fits:
        return text
    return (
        f"{text} That does not fit: make space, give a sweep_dir on another disk, or a smaller "
        "launcher.concurrent_runs"
    )


def evaluations(spec: RunSpec) -> int:
    """Return how often a run is evaluated: before the first step, on the way, after the last."""
    every = spec.evaluation_every_samples
    return 2 if every is None else 2 + (spec.samples - 1) // every


def _checkpoint(spec: RunSpec) -> int | None:
    """Return the size of a checkpoint: parameters, moments, averaged weights, random states."""
    parameters = count_parameters(spec.config, spec.data)
    if parameters is None:
        return None
    copies = 2 if isinstance(spec.config.optimizer, Sgd) else 3
    if spec.config.evaluation.ema_half_life_tokens is not None:
        copies += 1
    number = 8 if spec.precision == "float64" else 4
    layers = getattr(spec.config.model, "n_layers", 1) + 1
    names = copies * layers * _TENSORS_A_LAYER * _TENSOR
    ranks = spec.geometry.data_parallel_size
    return copies * parameters * number + names + ranks * _RANDOM_STATE
