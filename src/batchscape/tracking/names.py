"""Names in W&B of what a run folder holds; the part before the slash is a section of panels.

=============  ==================================================================
`loss/`        of training and of evaluation, and accuracy
`gradient/`    norm, terms of the noise scale, left-out updates, bytes exchanged
`optimizer/`   learning rate
`data/`        samples and labels of an optimizer step
`time/`        an optimizer step and its parts; evaluation; once a run: medians, start-up
`throughput/`  tokens and samples a second; once a run: means, FLOP/s, MFU
`system/`      power, clock, waits for a core; once a run: energy, throttling
`memory/`      once a run: the peak of each phase, over the ranks
=============  ==================================================================

A curve has a point an optimizer step or an evaluation. A figure has one point a run, with its last
row: W&B draws such a name as bars, one a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

__all__ = [
    "AXES",
    "CURVES",
    "FIGURES",
    "Row",
    "axis_of",
    "curve_points",
    "figure_points",
    "mirrored_names",
]

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

DERIVED = ("data/labels", "throughput/tokens_per_s", "throughput/samples_per_s")
"""Curves that are computed from more than one number of the rows."""

FIGURES: dict[str, str] = {
    "final_loss": "loss/final_train",
    "final_eval_loss": "loss/final_eval",
    "final_eval_accuracy": "loss/final_eval_accuracy",
    "gradient_noise_scale": "gradient/noise_scale",
    "skipped_optimizer_steps": "gradient/skipped_optimizer_steps",
    "step_time_s": "time/median_step_time_s",
    "step_time_p10_s": "time/p10_step_time_s",
    "step_time_p90_s": "time/p90_step_time_s",
    "data_s": "time/median_data_s",
    "forward_backward_s": "time/median_forward_backward_s",
    "exchange_s": "time/median_exchange_s",
    "optimizer_s": "time/median_optimizer_s",
    "exchange_span_s": "time/median_exchange_span_s",
    "gap_pct": "time/gap_pct",
    "startup_s": "time/startup_s",
    "memory_probe_s": "time/memory_probe_s",
    "compile_s": "time/compile_s",
    "checkpoint_s": "time/checkpoint_s",
    "tokens_per_s": "throughput/mean_tokens_per_s",
    "samples_per_s": "throughput/mean_samples_per_s",
    "tokens_per_s_per_device": "throughput/mean_tokens_per_s_per_device",
    "model_tflops_per_s_per_device": "throughput/model_tflops_per_s_per_device",
    "mfu_pct": "throughput/mfu_pct",
    "power_w": "system/mean_power_w_all_devices",
    "energy_j_per_token": "system/energy_j_per_token",
    "clock_mhz": "system/final_clock_mhz",
    "throttled": "system/throttled",
    "power_capped": "system/power_capped",
    "foreign_processes": "system/foreign_processes",
    "core_wait_pct": "system/core_wait_pct",
    "processor_time_s": "system/median_processor_time_s",
    "allocated_after_model_gib": "memory/allocated_after_model_gib",
    "peak_allocated_first_backward_gib": "memory/peak_allocated_first_backward_gib",
    "peak_allocated_first_optimizer_step_gib": "memory/peak_allocated_first_optimizer_step_gib",
    "peak_allocated_steady_gib": "memory/peak_allocated_steady_gib",
    "peak_allocated_gib": "memory/peak_allocated_gib",
    "peak_reserved_gib": "memory/peak_reserved_gib",
    "device_used_gib": "memory/device_used_gib",
    "workspace_gib": "memory/workspace_gib",
    "allocator_retries": "memory/allocator_retries",
    "uss_gib": "memory/uss_gib",
    "peak_rss_gib": "memory/peak_rss_gib",
    "peak_taken_gib": "memory/peak_taken_gib",
}
"""Name in W&B of each figure of the summary that makes a panel."""

_BY_OPTIMIZER_STEP = frozenset({"time", "throughput", "system", "memory"})


def axis_of(name: str) -> str:
    """Return the axis that a name is drawn over: `samples`, or `optimizer_step` for costs."""
    return "optimizer_step" if name.partition("/")[0] in _BY_OPTIMIZER_STEP else "samples"


def mirrored_names() -> list[str]:
    """Return every name that is drawn over an axis."""
    curves = [name for names in CURVES.values() for name in names.values()]
    return [*curves, *DERIVED, *FIGURES.values()]


def curve_points(
    table: str, row: Row, tokens_before: int | None, *, counts_tokens: bool = True
) -> dict[str, Any]:
    """Return what W&B gets of one row: the axes, and a point of each curve that has one there.

    Parameters
    ----------
    table : str
        `steps` or `evals`.
    row : mapping
        Values by column.
    tokens_before : int or None
        Tokens up to the optimizer step before, where known; not used for an evaluation.
    counts_tokens : bool
        As `record.summary.counts_tokens` has it; without, there are labels and no tokens a second.
    """
    points = {axis: row.get(axis) for axis in AXES}
    points |= {name: row.get(column) for column, name in CURVES[table].items()}
    if table == "steps":
        points |= _derived(row, tokens_before, counts_tokens=counts_tokens)
    return _plain(points)


def figure_points(summary: Row) -> dict[str, Any]:
    """Return the figures of a run that make panels, under their names in W&B.

    Parameters
    ----------
    summary : mapping
        Figures that count: times only where they are valid.
    """
    return _plain({name: summary.get(figure) for figure, name in FIGURES.items()})


def _derived(row: Row, tokens_before: int | None, *, counts_tokens: bool) -> dict[str, Any]:
    tokens, samples, step_time_s = (
        row.get(name) for name in ("tokens", "global_batch_size", "step_time_s")
    )
    points: dict[str, Any] = {}
    if tokens is not None and tokens_before is not None:
        points["data/labels"] = tokens - tokens_before
    if step_time_s is not None and not _is_missing(step_time_s) and step_time_s > 0:
        if "data/labels" in points and counts_tokens:
            points["throughput/tokens_per_s"] = points["data/labels"] / step_time_s
        if samples is not None:
            points["throughput/samples_per_s"] = samples / step_time_s
    return points


def _plain(points: dict[str, Any]) -> dict[str, Any]:
    """Leave missing values out; W&B draws numbers only, so that a truth value becomes 0 or 1."""
    present = {name: value for name, value in points.items() if not _is_missing(value)}
    return {name: int(v) if isinstance(v, bool) else v for name, v in present.items()}


def _is_missing(value: Any) -> bool:  # noqa: ANN401  (a scalar from JSON or pandas)
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))
