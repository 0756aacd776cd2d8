"""The machine of each run, and whether its times may be compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from batchscape.analysis.joins import column_of
from batchscape.record.timing import VERDICT, why_untimed

_LAUNCH = ("launch.world_size", *(f"launch.{name}" for name in VERDICT))
_FIGURES = (
    "core_wait_pct",
    "optimizer_steps",
    "measured_optimizer_steps",
    "foreign_processes",
    "throttled",
)


def add_machines(runs: pd.DataFrame) -> pd.DataFrame:
    """Add machine, precision and the validity of times to loaded runs."""
    runs = runs.reset_index(drop=True)
    launches = _values_of_runs(runs, _LAUNCH, drop="launch.")
    figures = _values_of_runs(runs, _FIGURES)
    notes = [why_untimed(launch, row) for launch, row in zip(launches, figures, strict=True)]
    note = pd.Series(notes, index=runs.index, dtype=object)
    launched = _column(runs, "launch.world_size").notna()
    requested = _column(runs, "engine.precision")
    columns = ("device_type", "launch.device_model", "environment.cpu.usable_cores")
    # What limits a device; a run without figures of its device takes its sweep's.
    limits, has_figures = _column(runs, "device_limits"), _column(runs, "throttled").notna()
    limits = _fill(limits.mask(limits.isna() & has_figures, ""), runs["sweep_dir"])
    devices = zip(*(_column(runs, name) for name in columns), limits, strict=True)
    where = {
        "hardware": pd.Series([_device(*row) for row in devices], runs.index, dtype=object),
        "device_type": _column(runs, "device_type"),
        "precision": _column(runs, "precision").fillna(requested.where(requested != "auto")),
    }
    return runs.drop(columns=[f"launch.{name}" for name in VERDICT], errors="ignore").assign(
        timing_valid=note.isna(),
        timing_note=note.where(launched | was_started(runs)),
        **{name: _fill(column, runs["sweep_dir"]) for name, column in where.items()},
    )


def was_started(runs: pd.DataFrame) -> pd.Series[bool]:
    """Tell started runs from pending and rejected ones."""
    return ~runs["status"].isin(["pending", "rejected"])


def is_timed_alone(runs: pd.DataFrame) -> pd.Series[bool]:
    """Tell the cuts that are timed alone: another cut of theirs is trained whole."""
    return column_of(runs, "timed_steps").notna()


def _column(runs: pd.DataFrame, name: str) -> pd.Series[Any]:
    return column_of(runs, name).astype(object)


def _values_of_runs(
    runs: pd.DataFrame, names: Sequence[str], drop: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield the values that each run has, by column."""
    keys = [name.removeprefix(drop) for name in names]
    for values in zip(*(_column(runs, name) for name in names), strict=True):
        yield {key: value for key, value in zip(keys, values, strict=True) if pd.notna(value)}


def _device(device_type: object, model: object, cores: object, limits: object) -> str | None:
    """Name a device by its model, and its usable cores or what limits it."""
    if not isinstance(model, str):
        return None
    has_cores = device_type == "cpu" and isinstance(cores, (int, float)) and cores > 0
    detail = f"{cores:g} cores" if has_cores else limits
    return f"{model}, {detail}" if isinstance(detail, str) and detail else model


def _fill(column: pd.Series[Any], sweep: pd.Series[Any]) -> pd.Series[Any]:
    """Fill gaps with the only value of the sweep, if it has one."""
    groups = column.groupby(sweep)
    only = groups.transform("first").where(groups.transform("nunique") == 1)
    return column.fillna(only)
