"""From rows as read to a log: the batch that follows from them, and what is filled in."""

from __future__ import annotations

import math
from typing import assert_never

from batchscape.config.metrics import LossOf
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics.inference import ObservedBatch
from batchscape.programs.metrics.log import Log
from batchscape.programs.metrics.rows import Row, fill_counts, fill_train_time

__all__ = ["finish", "settle_loss"]


def finish(
    steps: list[Row],
    evals: list[Row],
    batch: ObservedBatch,
    *,
    geometry: BatchGeometry,
    sequence_length: int | None,
    sources: dict[str, str],
    source: str,
) -> Log:
    """Infer the batch and fill in counts and times.

    Parameters
    ----------
    steps, evals : list of dict
        As read; changed in place.
    batch : ObservedBatch
        What was read of it elsewhere.
    geometry : BatchGeometry
        As planned: it counts samples where nothing was observed.
    sequence_length : int or None
        Tokens a sample, where every sample is full.
    sources : dict of str to str
        By name of a column.
    source : str
        Name of the log.
    """
    batch.put_growth("global_batch_size", steps, "samples", f"samples in the {source}")
    batch.put_growth("tokens_per_optimizer_step", steps, "tokens", f"tokens in the {source}")
    observed = batch.infer(sequence_length)
    size = observed.global_batch_size
    by = "planned" if size is None else "observed"
    filled = {"samples": f"optimizer steps x {by} global batch size"}
    if sequence_length is not None:
        filled["tokens"] = "samples x sequence length"
    for name, origin in filled.items():
        if steps and not any(name in row for row in steps):
            sources.setdefault(name, f"not logged; {origin}")
    for rows in (steps, evals):
        fill_counts(rows, size or geometry.global_batch_size, sequence_length)
    fill_train_time(steps, evals)
    return Log(steps, evals, observed, batch.problems, sources)


def settle_loss(
    steps: list[Row], loss_of: LossOf | None, batch: ObservedBatch, geometry: BatchGeometry
) -> str | None:
    """Take away every loss that is not the mean over the global batch of its step.

    One that is not finite stays: the training diverged, whatever the mean is over.

    Parameters
    ----------
    steps : list of dict
        Changed in place.
    loss_of : str or None
        What a loss is a mean over.
    batch : ObservedBatch
        What was read of it.
    geometry : BatchGeometry
        As planned; used where nothing was read.

    Returns
    -------
    str or None
        Why losses are missing; None where none is.
    """
    ranks = batch.value("world_size") or geometry.data_parallel_size
    parts = batch.value("gradient_accumulation_steps") or geometry.gradient_accumulation_steps
    before = 0
    removed = 0
    for row in steps:
        if "loss" not in row:
            continue
        step = int(row["optimizer_step"])
        if not _is_whole(loss_of, ranks, parts, step - before) and math.isfinite(row["loss"]):
            del row["loss"]
            removed += 1
        before = step
    if not removed:
        return None
    return f"missing in {removed} rows: the program logs that of a {loss_of}, not of the step"


def _is_whole(loss_of: LossOf | None, ranks: int, parts: int, window: int) -> bool:
    match loss_of:
        case None | "global_batch":
            return True
        case "rank":
            return ranks == 1
        case "micro_batch":
            return ranks * parts == 1
        case "window":
            return window == 1
    assert_never(loss_of)
