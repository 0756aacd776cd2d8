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
under the names of `record.summary`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

__all__ = ["AXES", "CURVES", "Row", "curve_points", "section_axes"]

Row = Mapping[str, Any]

AXES = ("optimizer_step", "samples", "tokens", "train_time_s")
"""Columns that every row of the history carries under their own names."""

CURVES: dict[str, dict[str, str]] = {
    "steps": {
        "loss": "loss/train",
        "gradient_norm": "gradient/norm",
        "small_gradient_square": "gradient/small_gradient_square",
        "small_batch_size": "gradient/small_batch_size",
        "skipped": "gradient/skipped",
        "exchanged_bytes": "gradient/exchanged_bytes",
        "learning_rate": "optimizer/learning_rate",
        "global_batch_size": "data/global_batch_size",
        "step_time_s": "time/step_time_s",
        "data_s": "time/data_s",
        "forward_backward_s": "time/forward_backward_s",
        "exchange_s": "time/exchange_s",
        "optimizer_s": "time/optimizer_s",
        "exchange_span_s": "time/exchange_span_s",
        "gap_s": "time/gap_s",
        "power_w": "system/power_w",
        "clock_mhz": "system/clock_mhz",
        "involuntary_switches": "system/involuntary_switches",
        "core_wait_s": "system/core_wait_s",
        "processor_time_s": "system/processor_time_s",
    },
    "evals": {
        "eval_loss": "loss/eval",
        "raw_eval_loss": "loss/raw_eval",
        "eval_accuracy": "loss/eval_accuracy",
        "evaluation_s": "time/evaluation_s",
    },
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
