"""Names in W&B of what a run folder holds; the part before the slash is a section of panels.

=============  ==================================================================
`loss/`        of training and of evaluation, and accuracy
`gradient/`    norm, terms of the noise scale, left-out updates, bytes exchanged
`optimizer/`   learning rate
`data/`        samples of an optimizer step
`time/`        an optimizer step and its parts; evaluation
`throughput/`  samples a second
`system/`      power, clock, waits for a core
=============  ==================================================================

A curve has a point an optimizer step or an evaluation. The figures of a run are in its summary,
under the names of `record.figures`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from batchscape.record.figures import COLUMNS

__all__ = ["AXES", "CURVES", "Row", "curve_points", "section_axes"]

Row = Mapping[str, Any]

AXES = ("optimizer_step", "samples", "tokens", "train_time_s")
"""Columns that every row of the history carries under their own names."""

CURVES: dict[str, dict[str, str]] = {
    table: {name: column.curve for name, column in COLUMNS[table].items() if column.curve}
    for table in ("steps", "evals")
}
"""Name in W&B of each mirrored column, by table."""

_THROUGHPUT = "throughput/samples_per_s"
_BY_OPTIMIZER_STEP = frozenset({"time", "throughput", "system"})


def section_axes() -> dict[str, str]:
    """Return the axis that a section is drawn over: `samples`, or `optimizer_step` for costs."""
    names = [_THROUGHPUT, *(name for names in CURVES.values() for name in names.values())]
    sections = {name.partition("/")[0] for name in names}
    return {s: "optimizer_step" if s in _BY_OPTIMIZER_STEP else "samples" for s in sections}


def curve_points(table: str, row: Row) -> dict[str, Any]:
    """Return what W&B gets of one row: the axes, and a point of each curve that has one there.

    W&B draws numbers only, so that a truth value becomes 0 or 1.

    Parameters
    ----------
    table : str
        `steps` or `evals`.
    row : mapping
        Values by column.
    """
    names = dict(zip(AXES, AXES, strict=True)) | CURVES[table]
    present = {column: row[column] for column in names if not _is_missing(row.get(column))}
    points = {names[c]: int(v) if isinstance(v, bool) else v for c, v in present.items()}
    if table == "steps" and present.get("step_time_s") and "global_batch_size" in present:
        points[_THROUGHPUT] = present["global_batch_size"] / present["step_time_s"]
    return points


def _is_missing(value: Any) -> bool:  # noqa: ANN401  (a scalar from JSON or pandas)
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))
