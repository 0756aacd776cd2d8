"""From rows as read to a log: the batch that follows from them, and what is filled in."""

from __future__ import annotations

import math

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


def settle_loss(steps: list[Row], parts: int = 1) -> str | None:
    """Take away every loss that is not the mean over the global batch of its step.

    One that is not finite stays: the training diverged, whatever the mean is over.

    Parameters
    ----------
    steps : list of dict
        Changed in place.
    parts : int
        Micro-batches of a global batch, over all ranks; 1 where a loss is a mean over all of them.

    Returns
    -------
    str or None
        Why losses are missing; None where none is.
    """
    before = removed = 0
    for row in steps:
        if "loss" not in row:
            continue
        step = int(row["optimizer_step"])
        if (parts > 1 or step - before > 1) and math.isfinite(row["loss"]):
            del row["loss"]
            removed += 1
        before = step
    if not removed:
        return None
    return f"missing in {removed} rows: the program may log that of a part, or of several steps"
