"""Where each run ran, whether its times may be compared, and whether its curve is a whole one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from batchscape.record.timing import VERDICT, why_untimed

__all__ = ["known_where", "was_started"]

_LAUNCH = ("launch.world_size", *(f"launch.{name}" for name in VERDICT))
_FIGURES = (
    "core_wait_pct",
    "optimizer_steps",
    "measured_optimizer_steps",
    "foreign_processes",
    "throttled",
)


def known_where(runs: pd.DataFrame) -> pd.DataFrame:
    """Add what tells machines apart, and the validity of times.

    A run that was never launched has no record of its machine. It takes its sweep's, where that
    is one machine.

    Parameters
    ----------
    runs : DataFrame
        One row a run, as `load` returns it.

    Returns
    -------
    DataFrame
        The same rows with `hardware`, `device_type`, `precision`, `timing_valid` and
        `timing_note` (why a launched run's times do not count, by `record.timing`; missing where
        they do), in place of what `launch.json` alone says of times.
    """
    runs = runs.reset_index(drop=True)
    launches = _known(runs, _LAUNCH, drop="launch.")
    figures = _known(runs, _FIGURES)
    notes = [why_untimed(*of_run) for of_run in zip(launches, figures, strict=True)]
    note = pd.Series(notes, index=runs.index, dtype=object)
    launched = _column(runs, "launch.world_size").notna()
    ended = was_started(runs)
    asked = _column(runs, "engine.precision")
    columns = ("device_type", "launch.device_model", "environment.cpu.usable_cores")
    devices = zip(*(_column(runs, name) for name in columns), _limits(runs), strict=True)
    where = {
        "hardware": pd.Series([_device(*row) for row in devices], runs.index, dtype=object),
        "device_type": _column(runs, "device_type"),
        "precision": _column(runs, "precision").fillna(asked.where(asked != "auto")),
    }
    return runs.drop(columns=[f"launch.{name}" for name in VERDICT], errors="ignore").assign(
        timing_valid=note.isna(),
        timing_note=note.where(launched | ended),
        **{name: _fill(column, runs["sweep_dir"]) for name, column in where.items()},
    )


def was_started(runs: pd.DataFrame) -> pd.Series[bool]:
    """Tell the runs that did something from those that have not yet, or never will.

    Parameters
    ----------
    runs : DataFrame
        With `status`.

    Returns
    -------
    Series of bool
    """
    return ~runs["status"].isin(["pending", "rejected"])


def _column(runs: pd.DataFrame, name: str) -> pd.Series[Any]:
    if name in runs.columns:
        return runs[name].astype(object)
    return pd.Series(None, index=runs.index, dtype=object)


def _known(runs: pd.DataFrame, names: Sequence[str], drop: str = "") -> Iterator[dict[str, Any]]:
    """Yield what is known of each run under some names."""
    for values in zip(*(_column(runs, name) for name in names), strict=True):
        named = zip(names, values, strict=True)
        yield {name.removeprefix(drop): value for name, value in named if pd.notna(value)}


def _device(device_type: object, model: object, cores: object, limits: object) -> str | None:
    """Name the device that a run was given, with the cores that it could use, or its limits.

    The same processor lent in parts is not the same machine, nor is a device that somebody set
    below its defaults.
    """
    if not isinstance(model, str):
        return None
    counted = device_type == "cpu" and isinstance(cores, (int, float)) and cores > 0
    of_it = f"{cores:g} cores" if counted else limits
    return f"{model}, {of_it}" if isinstance(of_it, str) and of_it else model


def _limits(runs: pd.DataFrame) -> pd.Series[Any]:
    """Return what devices were set to below their defaults: empty where nothing is, as was told.

    A run that left no figures of its device, as one out of memory, takes its sweep's.
    """
    limits, is_told = _column(runs, "device_limits"), _column(runs, "throttled").notna()
    return _fill(limits.mask(limits.isna() & is_told, ""), runs["sweep_dir"])


def _fill(column: pd.Series[Any], sweep: pd.Series[Any]) -> pd.Series[Any]:
    groups = column.groupby(sweep)
    only = groups.transform("first").where(groups.transform("nunique") == 1)
    return column.fillna(only)
