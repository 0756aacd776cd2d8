"""Errors of the first gradient: against float64, and between decompositions.

The first gradient is computed from the same parameters (drawn in float32, whatever the precision)
and the same samples in every decomposition and precision, so that what differs is rounding.
Distances come from sketches (`measure.gradient_sketch` of the training): unbiased in the square,
with a relative standard deviation of about 3 % for the ratio of two norms of 1024 buckets.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.cells import Cells, plain_texts
from batchscape.analysis.equivalence.decompositions import members_of
from batchscape.analysis.estimates import half_widths
from batchscape.errors import AnalysisError, RecordError
from batchscape.record.folder import SweepFolder
from batchscape.record.gradient_sketch import read_sketch

_NOT_OF_THE_REFERENCE = {"precision", "hardware", "device_type"}
"""Settings in which a run may differ from its float64 reference."""

_STATUSES = (
    "completed",
    "diverged",
    "running",
    "interrupted",
    "pruned",
    "timeout",
    "oom",
    "failed",
)

Sketch = NDArray[np.float64]


def sketch_spread(buckets: int) -> float:
    """Return the relative standard deviation of the ratio of two norms from sketches.

    Parameters
    ----------
    buckets : int
        Length of a sketch.

    Notes
    -----
    The square of each norm has at most sqrt(2 / buckets), its root half of that, and two that are
    independent add in squares. Source: Thorup, Zhang 2012, doi:10.1137/100800774.
    """
    return math.sqrt(2) * 0.5 * math.sqrt(2 / buckets)


def relative_distance(sketch: Sketch, reference: Sketch) -> float:
    """Estimate the distance of two gradients over the norm of the second, from their sketches.

    Parameters
    ----------
    sketch, reference : ndarray, shape (buckets,)

    Returns
    -------
    float
        NaN where one of them is not finite, or the reference is zero.

    Raises
    ------
    AnalysisError
        If the sketches have different lengths.
    """
    if sketch.shape != reference.shape:
        msg = f"sketches of different lengths cannot be compared: {sketch.shape}, {reference.shape}"
        raise AnalysisError(msg)
    norm = float(np.linalg.norm(reference))
    distance = float(np.linalg.norm(sketch - reference))
    is_defined = math.isfinite(norm) and math.isfinite(distance) and norm > 0
    return distance / norm if is_defined else math.nan


def gradient_errors(cells: Cells) -> pd.DataFrame:
    """Compute the errors of the first gradient of every run that has something to compare with.

    Returns
    -------
    DataFrame
        A row a run, one for each cell and trajectory: `cell`, `trajectory_id`, `sweep_dir`,
        `run_id`, `precision`, `relative_error` (against the float64 run of the same settings but
        precision, of the first decomposition that has one), `reference_run_id` (that run),
        `relative_difference` (from the first decomposition of the same trajectory; NaN for that
        one itself) and `buckets`. Runs with neither are left out.
    """
    members = members_of(cells, _STATUSES)
    runs = cells.runs.loc[members.index]
    members = members.assign(precision=runs["precision"], start=_start_keys(cells, runs))
    exact = members[members["precision"].eq("float64")]
    has_reference = members["start"].isin(exact["start"])
    has_reference |= members["trajectory_id"].duplicated(keep=False)
    members = members[has_reference].sort_values("cell", kind="stable")
    sketches_read = map(_read_sketch, members["sweep_dir"], members["run_id"])
    sketches = {
        row: sketch
        for row, sketch in zip(members.index, sketches_read, strict=True)
        if sketch is not None
    }
    members = members[members.index.isin(sketches)]
    by_start, by_trajectory = _first(members, "start", "float64"), _first(members, "trajectory_id")
    rows = []
    for row in members.itertuples():
        against, first = by_start.get(row.start), by_trajectory[row.trajectory_id]
        sketch = sketches[row.Index]
        rows.append(
            {
                "relative_error": _distance_from(sketch, row.Index, against, sketches),
                "reference_run_id": None if against is None else members.at[against, "run_id"],
                "relative_difference": _distance_from(sketch, row.Index, first, sketches),
                "buckets": len(sketch),
            }
        )
    figures = pd.DataFrame(
        rows,
        index=members.index,
        columns=["relative_error", "reference_run_id", "relative_difference", "buckets"],
    )
    kept = ["cell", "trajectory_id", "sweep_dir", "run_id", "precision"]
    table = pd.concat([members[kept], figures], axis=1)
    return table.dropna(subset=["relative_error", "relative_difference"], how="all")


def gradient_error_table(errors: pd.DataFrame) -> pd.DataFrame:
    """Average the errors of `gradient_errors` over the runs of each cell, with 95 % t-intervals."""
    groups = errors.groupby("cell")
    table = pd.DataFrame({"precision": groups["precision"].first()})
    for name in ("relative_error", "relative_difference"):
        group = errors[name].astype(float).groupby(errors["cell"])
        n = group.count()
        half = half_widths(group.std(), n)
        table[name] = group.mean()
        # A distance is not below zero.
        table[f"{name}_low"] = (table[name] - half).clip(lower=0)
        table[f"{name}_high"] = table[name] + half
        table[f"{name}_max"] = group.max()
        table[f"{name}_n"] = n
    table["buckets"] = groups["buckets"].first()
    table["run_ids"] = groups["run_id"].agg(" ".join)
    references = errors["reference_run_id"].fillna("")
    table["reference_run_ids"] = references.groupby(errors["cell"]).agg(" ".join).str.strip()
    table["sweep_dirs"] = groups["sweep_dir"].agg(lambda dirs: ";".join(dirs.unique()))
    return table


def _start_keys(cells: Cells, runs: pd.DataFrame) -> pd.Series[str]:
    """Join the settings that decide the first gradient apart from its rounding."""
    names = [name for name in cells.contexts if name not in _NOT_OF_THE_REFERENCE]
    keys = [plain_texts(runs[name]) for name in names if name in runs]
    keys += [plain_texts(runs[name]) for name in ("init_seed", "data_seed") if name in runs]
    rows = zip(runs["global_batch_size"].astype(str), *keys, strict=True)
    return pd.Series(["\n".join(row) for row in rows], index=runs.index, dtype=str)


def _read_sketch(sweep_dir: str, run_id: str) -> Sketch | None:
    try:
        return read_sketch(SweepFolder(Path(sweep_dir)).run(run_id))
    except RecordError:
        # The reader refuses a sealed run with a damaged file; an open run may lose its sketch.
        return None


def _first(members: pd.DataFrame, key: str, precision: str | None = None) -> dict[object, object]:
    """Return the row of the first cell for each value of a column."""
    if precision is not None:
        members = members[members["precision"].eq(precision)]
    first = members.drop_duplicates(key)
    return dict(zip(first[key], first.index, strict=True))


def _distance_from(
    sketch: Sketch, row: object, other: object, sketches: dict[object, Sketch]
) -> float:
    """Return the relative distance from another run; NaN where there is none, or it is itself."""
    return math.nan if other is None or other == row else relative_distance(sketch, sketches[other])
