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

from batchscape.analysis.cells import Cells
from batchscape.analysis.comparing.pairs import blocks_of
from batchscape.analysis.comparison import spreads_of
from batchscape.analysis.equivalence.decompositions import members_of
from batchscape.errors import RecordError
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
    """
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
    settings = [name for name in cells.contexts if name not in _NOT_OF_THE_REFERENCE]
    start = blocks_of(runs, ["global_batch_size", *settings, "init_seed", "data_seed"])
    members = members.assign(precision=runs["precision"], start=start)
    exact = members["precision"].eq("float64")
    has_reference = start.isin(start[exact]) | members["trajectory_id"].duplicated(keep=False)
    members = members[has_reference].sort_values("cell", kind="stable")
    folders = zip(members["sweep_dir"], members["run_id"], strict=True)
    read = dict(zip(members.index, (_read_sketch(*folder) for folder in folders), strict=True))
    sketches = {row: sketch for row, sketch in read.items() if sketch is not None}
    members = members.loc[list(sketches)]
    for name, key, rows in (
        ("relative_error", "start", members[members["precision"].eq("float64")]),
        ("relative_difference", "trajectory_id", members),
    ):
        first = rows.drop_duplicates(key).reset_index(names="row").set_index(key)["row"]
        members[f"{name}_from"] = members[key].map(first)
        members[name] = [
            math.nan
            if pd.isna(other) or other == row
            else relative_distance(sketches[row], sketches[other])
            for row, other in members[f"{name}_from"].items()
        ]
    members["reference_run_id"] = members["relative_error_from"].map(members["run_id"])
    members["buckets"] = [len(sketches[row]) for row in members.index]
    kept = ["cell", "trajectory_id", "sweep_dir", "run_id", "precision"]
    errors = ["relative_error", "reference_run_id", "relative_difference"]
    table = members[[*kept, *errors, "buckets"]]
    return table.dropna(subset=["relative_error", "relative_difference"], how="all")


def gradient_error_table(errors: pd.DataFrame) -> pd.DataFrame:
    """Average the errors of `gradient_errors` over the runs of each cell, with 95 % t-intervals."""
    groups = errors.assign(reference_run_id=errors["reference_run_id"].fillna("")).groupby("cell")
    table = groups[["precision", "buckets"]].first()
    for name, spread in spreads_of(groups[["relative_error", "relative_difference"]]).items():
        table[name] = spread["mean"]
        # A distance is not below zero.
        table[f"{name}_low"] = (spread["mean"] - spread["ci95"]).clip(lower=0)
        table[f"{name}_high"] = spread["mean"] + spread["ci95"]
        table[f"{name}_n"] = spread["n"]
    table["run_ids"] = groups["run_id"].agg(" ".join)
    table["reference_run_ids"] = groups["reference_run_id"].agg(" ".join).str.strip()
    table["sweep_dirs"] = groups["sweep_dir"].agg(lambda dirs: ";".join(dirs.unique()))
    return table


def _read_sketch(sweep_dir: str, run_id: str) -> Sketch | None:
    try:
        return read_sketch(SweepFolder(Path(sweep_dir)).run(run_id))
    except RecordError:
        # The reader refuses a sealed run with a damaged file; an open run may lose its sketch.
        return None
